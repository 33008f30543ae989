#include "data/vocabulary.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/json_value.h"
#include "base/text.h"
#include "data/tokenizer_files.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostTokens = 1 << 24;
constexpr int kDeepestVocabulary = 12;
constexpr const char* kEndOfText = "<|endoftext|>";

// Letters, digits and blanks of Unicode 16, as the package tokenizers has them (scripts/try-tokenizers): with those
// that PCRE2 may be too old to know.
constexpr std::string_view kLetters =
    R"(\p{L})"
    R"(\x{1C89}-\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D4A}-\x{10D65})"
    R"(\x{10D6F}-\x{10D85}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389}\x{1138B}\x{1138E})"
    R"(\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10})"
    R"(\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D})"
    R"(\x{16D40}-\x{16D6C}\x{18CFF}\x{1B132}\x{1B155}\x{1DF25}-\x{1DF2A}\x{1E030}-\x{1E06D})"
    R"(\x{1E4D0}-\x{1E4EB}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})";
constexpr std::string_view kDigits =
    R"(\p{N})"
    R"(\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})"
    R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})";
constexpr std::string_view kBlanks =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}-\x{2029}\x{202F}\x{205F}\x{3000})";

// How GPT-2 cuts a text into words before it merges anything: endings, letters, digits, other signs, blanks; a blank
// before a word belongs to it.
std::string words_pattern() {
  return fmt::format("'(?:s|t|re|ve|m|ll|d)| ?[{0}]+| ?[{1}]+| ?[^{2}{0}{1}]+|[{2}]+(?![^{2}])|[{2}]+", kLetters,
                     kDigits, kBlanks);
}

// The files write each byte as a character that can be seen: the printable ones as themselves, the others in order from
// U+0100 on.
constexpr bool is_printable(int byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

std::array<std::string, 256> visible_bytes() {
  std::array<std::string, 256> all;
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const int code = is_printable(byte) ? byte : next++;
    std::string& text = all[static_cast<std::size_t>(byte)];
    if (code < 0x80) {
      text = static_cast<char>(code);
    } else {
      text += static_cast<char>(0xC0 | code >> 6);
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
  return all;
}

// "Ġthe" → " the"; nothing for what stands for no bytes.
std::optional<std::string> to_bytes(std::string_view visible) {
  static const auto bytes_of = [] {
    std::unordered_map<std::string, char> table;
    const auto all = visible_bytes();
    for (std::size_t byte = 0; byte < all.size(); ++byte) table[all[byte]] = static_cast<char>(byte);
    return table;
  }();
  std::string bytes;
  while (!visible.empty()) {
    const std::size_t length =
        std::min<std::size_t>(static_cast<unsigned char>(visible[0]) < 0x80 ? 1 : 2, visible.size());
    const auto found = bytes_of.find(std::string(visible.substr(0, length)));
    if (found == bytes_of.end()) return std::nullopt;
    bytes += found->second;
    visible.remove_prefix(length);
  }
  return bytes;
}

struct CodeDeleter {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct MatchDeleter {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

struct BytePairs::Tables {
  struct Merge {
    std::int32_t rank, made;
  };
  std::vector<std::string> tokens;  // their bytes
  std::optional<std::int32_t> end;
  std::array<std::int32_t, 256> single = {};
  std::unordered_map<std::uint64_t, Merge> merges;  // by the pair
  std::unique_ptr<pcre2_code, CodeDeleter> words;
  AddedTokens added;
  bool add_prefix_space = false;

  void encode(std::string_view text, std::size_t offset, const std::string& source,
              std::vector<std::int32_t>& to) const;
  using Numbers = std::unordered_map<std::string, std::int32_t>;
  /// `listed`: the merges of a tokenizer.json; nothing: it is no such file.
  Numbers read_vocabulary(const std::string& path, std::optional<nlohmann::json>& listed);
  void read_merges(const std::string& path, const Numbers& numbers);
  void take_merges(const nlohmann::json& listed, const std::string& path, const Numbers& numbers);
  bool add_merge(std::string_view left, std::string_view right, const Numbers& numbers);
  void add_tokens(const std::string& path, bool whole);
  void check_merges(const std::string& path, const std::string& vocabulary, const Numbers& numbers) const;
  void compile_words();
  void merge_word(std::string_view word, std::vector<std::int32_t>& to) const;
};

BytePairs::Tables::Numbers BytePairs::Tables::read_vocabulary(const std::string& path,
                                                              std::optional<nlohmann::json>& listed) {
  const auto refuse = [&](const std::string& why) {
    throw IoError(fmt::format("{} is not a usable vocabulary: {}", path, why),
                  "take GPT-2's vocab.json or tokenizer.json");
  };
  const MappedFile file(path);
  nlohmann::json json;
  try {
    json = parse_json(file.text(), kDeepestVocabulary);
  } catch (const JsonError& error) {
    refuse(fmt::format("it {}", error.what()));
  }
  // Of a tokenizer.json the rest is read as of one beside a vocabulary (read_tokenizer_file()).
  if (const auto model = json.is_object() ? json.find("model") : json.end();
      model != json.end() && model->is_object() && model->contains("vocab") && model->contains("merges")) {
    listed = std::move((*model)["merges"]);
    json = nlohmann::json((*model)["vocab"]);
  }
  if (!json.is_object() || json.empty() || json.size() > kMostTokens) refuse("it is no object of tokens");
  Numbers numbers;
  tokens.resize(json.size());
  std::vector<bool> seen(json.size());
  for (const auto& [token, number] : json.items()) {
    const auto place = whole_number(number, tokens.size() - 1);
    if (!place || seen[*place])
      refuse(fmt::format("the number of '{}' is not one of 0 to {}, each once", token, tokens.size() - 1));
    const std::size_t at = place.value();
    seen[at] = true;
    tokens[at] = token;
    numbers[token] = static_cast<std::int32_t>(at);
  }
  const auto visible = visible_bytes();
  for (std::size_t byte = 0; byte < visible.size(); ++byte) {
    const auto found = numbers.find(visible[byte]);
    if (found == numbers.end()) refuse(fmt::format("it has no token for the byte {}", byte));
    single[byte] = found->second;
  }
  if (const auto found = numbers.find(kEndOfText); found != numbers.end()) end = found->second;
  return numbers;
}

/// Of the names in `tokens` makes their bytes; those of added tokens stand for themselves.
void BytePairs::Tables::add_tokens(const std::string& path, bool whole) {
  const TokenizerFiles files =
      whole ? read_tokenizer_file(path, TokenizerKind::kGpt2) : read_tokenizer_files(path, TokenizerKind::kGpt2);
  append_added_tokens(files, tokens, path);
  add_prefix_space = files.add_prefix_space;
  for (const auto& [name, number] : files.added) {
    if (name == kEndOfText)
      end = static_cast<std::int32_t>(number);
    else
      added.add(name, static_cast<std::int32_t>(number));
  }
  if (end) added.add(kEndOfText, *end);
  const auto names = added.names();
  for (std::string& token : tokens)
    if (std::ranges::find(names, token) == names.end()) token = to_bytes(token).value_or(token);
}

/// Whatever the vocabulary has is made by merges, or has a name that marks it as something else.
void BytePairs::Tables::check_merges(const std::string& path, const std::string& vocabulary,
                                     const Numbers& numbers) const {
  std::vector<bool> made(tokens.size());
  for (const std::int32_t token : single) made[static_cast<std::size_t>(token)] = true;
  for (const auto& [pair, merge] : merges) made[static_cast<std::size_t>(merge.made)] = true;
  const auto names = added.names();
  std::int32_t first = -1;
  std::size_t missing = 0;
  for (const auto& [name, number] : numbers) {
    const bool marked =
        (name.starts_with('<') && name.ends_with('>')) || (name.starts_with('[') && name.ends_with(']'));
    if (made[static_cast<std::size_t>(number)] || marked || std::ranges::find(names, name) != names.end()) continue;
    ++missing;
    if (first < 0 || number < first) first = number;
  }
  const char* const remedy = "take the merges.txt that belongs to the vocabulary, all of it";
  if (merges.empty()) throw IoError(fmt::format("{} has no merges: it is empty, or cut", path), remedy);
  if (missing > 0)
    throw IoError(
        fmt::format("{} is cut, or belongs to another vocabulary: it does not make {} of the {} tokens of {}, "
                    "the first of them '{}'",
                    path, missing, numbers.size(), vocabulary,
                    printable(utf8_prefix(tokens[static_cast<std::size_t>(first)], 40))),
        remedy);
}

/// Whether both are tokens, their union is one, and they are new; the next in rank.
bool BytePairs::Tables::add_merge(std::string_view left, std::string_view right, const Numbers& numbers) {
  const auto number = [&](const std::string& token) {
    const auto found = numbers.find(token);
    return found == numbers.end() ? -1 : found->second;
  };
  const std::int32_t first = number(std::string(left)), second = number(std::string(right));
  const std::int32_t made = number(std::string(left) + std::string(right));
  if (first < 0 || second < 0 || made < 0) return false;
  return merges.emplace(key_of(first, second), Merge{static_cast<std::int32_t>(merges.size()), made}).second;
}

/// "a b", or since version 0.20 of the package ["a", "b"].
void BytePairs::Tables::take_merges(const nlohmann::json& listed, const std::string& path, const Numbers& numbers) {
  const auto refuse = [&](std::size_t at) {
    throw IoError(
        fmt::format("{}: merge {} is no pair of tokens whose union is one, or stands there twice", path, at + 1),
        "take the tokenizer.json as it was published");
  };
  if (!listed.is_array())
    throw IoError(fmt::format("{}: its merges are no list", path), "take the tokenizer.json as it was published");
  for (std::size_t i = 0; i < listed.size(); ++i) {
    const auto& pair = listed[i];
    if (pair.is_array() && pair.size() == 2 && pair[0].is_string() && pair[1].is_string()) {
      if (!add_merge(pair[0].get_ref<const std::string&>(), pair[1].get_ref<const std::string&>(), numbers)) refuse(i);
      continue;
    }
    if (!pair.is_string()) refuse(i);
    const std::string_view text = pair.get_ref<const std::string&>();
    const auto space = text.find(' ');
    if (space == std::string_view::npos || !add_merge(text.substr(0, space), text.substr(space + 1), numbers))
      refuse(i);
  }
}

void BytePairs::Tables::read_merges(const std::string& path, const Numbers& numbers) {
  const MappedFile file(path);
  std::string_view text = file.text();
  for (std::size_t line = 1; !text.empty(); ++line) {
    std::string_view pair = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), pair.size() + 1));
    if (pair.ends_with('\r')) pair.remove_suffix(1);
    if (pair.empty() || (line == 1 && pair.starts_with("#version"))) continue;
    const auto space = pair.find(' ');
    if (space == std::string_view::npos || !add_merge(pair.substr(0, space), pair.substr(space + 1), numbers))
      throw IoError(
          fmt::format("{}: line {} is no pair of tokens whose union is one, or stands there twice", path, line),
          "take the merges.txt that belongs to the vocabulary");
  }
}

void BytePairs::Tables::compile_words() {
  int code = 0;
  PCRE2_SIZE at = 0;
  const std::string pattern = words_pattern();
  words.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP, &code,
                            &at, nullptr));
  LOCKSTEP_ASSERT(words != nullptr, "PCRE2 refuses the pattern of words at {}: {}", at, code);
  pcre2_jit_compile(words.get(), PCRE2_JIT_COMPLETE);  // faster where it can be had
}

// Merges the likeliest pair of neighbours again and again, of several of them the leftmost one first. Words can be as
// long as the text: pairs wait in a heap.
void BytePairs::Tables::merge_word(std::string_view word, std::vector<std::int32_t>& to) const {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  struct Part {
    std::int32_t token;
    std::size_t before, after;
    bool there = true;
  };
  struct Candidate {
    std::int32_t rank;
    std::size_t left;
    std::uint64_t pair;
    std::int32_t made;
  };
  const auto later = [](const Candidate& a, const Candidate& b) {
    return std::tie(a.rank, a.left) > std::tie(b.rank, b.left);
  };
  std::vector<Part> parts(word.size());
  std::vector<Candidate> heap;
  const auto consider = [&](std::size_t left) {
    if (left == kNone || parts[left].after == kNone) return;
    const std::uint64_t pair = key_of(parts[left].token, parts[parts[left].after].token);
    const auto found = merges.find(pair);
    if (found == merges.end()) return;
    heap.push_back({found->second.rank, left, pair, found->second.made});
    std::push_heap(heap.begin(), heap.end(), later);
  };
  for (std::size_t i = 0; i < parts.size(); ++i)
    parts[i] = {single[static_cast<unsigned char>(word[i])], i > 0 ? i - 1 : kNone,
                i + 1 < parts.size() ? i + 1 : kNone};
  for (std::size_t i = 0; i < parts.size(); ++i) consider(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Candidate best = heap.back();
    heap.pop_back();
    Part& left = parts[best.left];
    // What has been merged meanwhile is another pair, or none.
    if (!left.there || left.after == kNone || key_of(left.token, parts[left.after].token) != best.pair) continue;
    Part& right = parts[left.after];
    right.there = false;
    left.token = best.made;
    left.after = right.after;
    if (left.after != kNone) parts[left.after].before = best.left;
    consider(left.before);
    consider(best.left);
  }
  for (std::size_t i = 0; i != kNone && i < parts.size(); i = parts[i].after) to.push_back(parts[i].token);
}

BytePairs::BytePairs(const std::string& vocabulary_path, const std::string& merges_path) {
  auto tables = std::make_unique<Tables>();
  std::optional<nlohmann::json> listed;
  const auto numbers = tables->read_vocabulary(vocabulary_path, listed);
  if (listed && !merges_path.empty())
    throw UsageError(fmt::format("{} beside {}, which has its own merges", merges_path, vocabulary_path),
                     "leave the merges out");
  const std::string merges = listed                 ? vocabulary_path
                             : !merges_path.empty() ? merges_path
                                                    : (fs::path(vocabulary_path).parent_path() / "merges.txt").string();
  if (listed)
    tables->take_merges(*listed, vocabulary_path, numbers);
  else
    tables->read_merges(merges, numbers);
  tables->add_tokens(vocabulary_path, listed.has_value());
  tables->check_merges(merges, vocabulary_path, numbers);
  tables->compile_words();
  tables_ = std::move(tables);
}

std::vector<std::pair<std::string, std::string>> BytePairs::files_of(const std::string& vocabulary_path,
                                                                     const std::string& merges_path) {
  Tables tables;
  std::optional<nlohmann::json> listed;
  tables.read_vocabulary(vocabulary_path, listed);
  const fs::path directory = fs::path(vocabulary_path).parent_path();
  std::vector<std::pair<std::string, std::string>> files;
  if (listed) {
    files.emplace_back("tokenizer.json", vocabulary_path);
  } else {
    files.emplace_back("vocab.json", vocabulary_path);
    files.emplace_back("merges.txt", merges_path.empty() ? (directory / "merges.txt").string() : merges_path);
  }
  for (const char* const name : {"tokenizer_config.json", "added_tokens.json"})
    if (fs::exists(directory / name)) files.emplace_back(name, (directory / name).string());
  return files;
}

BytePairs::~BytePairs() = default;

std::optional<std::int32_t> BytePairs::end_of_text() const { return tables_->end; }

std::string BytePairs::sha256() const {
  const Tables& t = *tables_;
  Sha256 hash;
  for (const std::string& token : t.tokens) hash.update(fmt::format("{} {}\n", token.size(), token));
  std::vector<std::uint64_t> pairs(t.merges.size());
  for (const auto& [pair, merge] : t.merges) pairs[static_cast<std::size_t>(merge.rank)] = pair;
  for (const std::uint64_t pair : pairs) hash.update(fmt::format("{} {}\n", pair >> 32, pair & 0xFFFFFFFF));
  for (const std::string& name : t.added.names()) hash.update(fmt::format("{} {}\n", name.size(), name));
  hash.update(t.add_prefix_space ? "a blank first" : "");
  return hash.finish();
}

int BytePairs::size() const { return static_cast<int>(tables_->tokens.size()); }

std::vector<std::int32_t> BytePairs::encode(std::string_view text, const std::string& source) const {
  std::vector<std::int32_t> tokens;
  tables_->added.cut(
      text,
      [&](std::string_view part) {
        const auto offset = static_cast<std::size_t>(part.data() - text.data());
        if (tables_->add_prefix_space && !part.starts_with(' '))
          tables_->encode(" " + std::string(part), offset - 1, source, tokens);
        else
          tables_->encode(part, offset, source, tokens);
      },
      [&](std::int32_t token) { tokens.push_back(token); });
  return tokens;
}

/// Of a text without added tokens, which begins at byte `offset` of `source`.
void BytePairs::Tables::encode(std::string_view text, std::size_t offset, const std::string& source,
                               std::vector<std::int32_t>& to) const {
  const std::unique_ptr<pcre2_match_data, MatchDeleter> match(
      pcre2_match_data_create_from_pattern(words.get(), nullptr));
  if (match == nullptr) throw std::bad_alloc();
  PCRE2_SIZE at = 0;
  std::uint32_t checks = 0;  // the whole text is checked once
  while (at < text.size()) {
    const int found = pcre2_match(words.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                  checks | PCRE2_ANCHORED, match.get(), nullptr);
    if (found < 0 && found != PCRE2_ERROR_NOMATCH && pcre2_get_startchar(match.get()) < text.size() && checks == 0)
      throw IoError(fmt::format("{}: byte {} is not UTF-8", source, offset + pcre2_get_startchar(match.get())),
                    "convert it from the encoding that it has: iconv -f WINDOWS-1252 -t UTF-8, for example");
    LOCKSTEP_ASSERT(found >= 0, "no word at byte {} of {}: {}", offset + at, source, found);
    checks = PCRE2_NO_UTF_CHECK;
    const PCRE2_SIZE end_of_word = pcre2_get_ovector_pointer(match.get())[1];
    LOCKSTEP_ASSERT(end_of_word > at, "an empty word at byte {} of {}", offset + at, source);
    merge_word(text.substr(at, end_of_word - at), to);
    at = end_of_word;
  }
}

std::string BytePairs::decode(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (const std::int32_t token : tokens) {
    LOCKSTEP_ASSERT(token >= 0 && token < size(), "token {} of {}", token, size());
    text += tables_->tokens[static_cast<std::size_t>(token)];
  }
  return text;
}

}  // namespace lockstep::data
