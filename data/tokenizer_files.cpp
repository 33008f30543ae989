#include "data/tokenizer_files.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/text.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kDeepestTokenizer = 12;
constexpr std::uint64_t kMostAddedTokens = 1 << 24;

class TokenizerReader {
 public:
  TokenizerReader(std::string path, TokenizerKind kind, TokenizerFiles& to)
      : path_(std::move(path)), kind_(kind), to_(to) {}

  void read(std::string_view text, void (TokenizerReader::*take_from)(const Json&)) {
    try {
      const Json json = parse_json(text, kDeepestTokenizer);
      if (!json.is_object()) refuse("it is no object");
      (this->*take_from)(json);
    } catch (const JsonError& error) {
      refuse(fmt::format("it {}", error.what()));
    } catch (const Json::exception&) {
      refuse("something is missing, or of another type");
    }
    to_.source += (to_.source.empty() ? "" : " and ") + fs::path(path_).filename().string();
  }

  void take_config(const Json& json) {
    take_tokenizer_class(json);
    if (kind_ == TokenizerKind::kBert) {
      // Without a word of marks, those who take lower case leave them out.
      const auto lower = flag(json, "do_lower_case");
      take_case(lower, flag(json, "strip_accents"));
      take(to_.split_ideographs, flag(json, "tokenize_chinese_chars"));
      if (flag(json, "do_basic_tokenize") == false) refuse_setting("do_basic_tokenize", "false");
      if (const auto never = json.find("never_split"); never != json.end() && !never->empty())
        refuse_setting("never_split", never->dump());
      for (const auto& [key, name] :
           {std::pair("unk_token", "[UNK]"), std::pair("sep_token", "[SEP]"), std::pair("pad_token", "[PAD]"),
            std::pair("cls_token", "[CLS]"), std::pair("mask_token", "[MASK]")})
        check_name(json, key, name);
    } else {
      if (flag(json, "add_prefix_space") == true) to_.add_prefix_space = true;
      if (flag(json, "add_bos_token") == true) refuse_setting("add_bos_token", "true");
    }
    if (const auto added = json.find("added_tokens_decoder"); added != json.end())
      for (const auto& [number, token] : added->items()) {
        const auto value = parse_int(number);
        if (!value) refuse(fmt::format("'{}' in added_tokens_decoder is no number", printable(number)));
        take_added(token, *value);
      }
  }

  void take_tokenizer(const Json& json) {
    const Json& model = json.at("model");
    const bool bert = kind_ == TokenizerKind::kBert;
    check_type(model, "model", bert ? "WordPiece" : "BPE");
    if (bert) {
      const Json& normalizer = json.at("normalizer");
      check_type(normalizer, "normalizer", "BertNormalizer");
      check_type(json.at("pre_tokenizer"), "pre_tokenizer", "BertPreTokenizer");
      take_case(flag(normalizer, "lowercase"), flag(normalizer, "strip_accents"));
      take(to_.split_ideographs, flag(normalizer, "handle_chinese_chars"));
      if (flag(normalizer, "clean_text") == false) refuse_setting("clean_text", "false");
    } else {
      if (const auto found = json.find("normalizer"); found != json.end() && !found->is_null())
        refuse_setting("normalizer", type_of(*found));
      const Json& cutter = json.at("pre_tokenizer");
      check_type(cutter, "pre_tokenizer", "ByteLevel");
      if (flag(cutter, "use_regex") == false) refuse_setting("use_regex", "false");
      if (flag(cutter, "add_prefix_space") == true) to_.add_prefix_space = true;
    }
    if (const auto added = json.find("added_tokens"); added != json.end())
      for (const Json& token : *added) take_added(token, number_of(token.at("id")));
  }

  void take_list(const Json& json) {
    for (const auto& [name, number] : json.items()) take_added(Json(name), number_of(number));
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(fmt::format("{} says how texts are cut, and cannot be used: {}", path_, why),
                  kind_ == TokenizerKind::kBert ? "move it away: --cased yes or no says how texts are read"
                                                : "move it away: texts are then cut as GPT-2's are");
  }
  [[noreturn]] void refuse_setting(const char* name, const std::string& value) const {
    refuse(fmt::format("{} is {}, which lockstep cannot do", name, printable(utf8_prefix(value, 60))));
  }

  static std::string type_of(const Json& json) {
    return json.is_object() ? json.value("type", std::string("of no type")) : json.dump();
  }
  void check_type(const Json& json, const char* name, const char* wanted) const {
    // Files of old versions do not name their model's.
    if (json.is_object() && !json.contains("type") && std::string_view(name) == "model") return;
    if (type_of(json) != wanted) refuse_setting(name, type_of(json));
  }

  /// Nothing: it is not there, or null.
  std::optional<bool> flag(const Json& json, const char* name) const {
    const auto found = json.find(name);
    if (found == json.end() || found->is_null()) return std::nullopt;
    if (!found->is_boolean()) refuse(fmt::format("{} is neither true nor false", name));
    return found->get<bool>();
  }
  static void take(std::optional<bool>& to, std::optional<bool> said) {
    if (!to) to = said;
  }
  void take_case(std::optional<bool> lower, std::optional<bool> strip) {
    if (!to_.lower_case && lower) {
      to_.lower_case = lower;
      take(to_.strip_marks, strip ? strip : lower);
    }
    take(to_.strip_marks, strip);
  }

  void take_tokenizer_class(const Json& json) const {
    const std::string name = json.value("tokenizer_class", std::string());
    if (name.find("Japanese") != std::string::npos) refuse_setting("tokenizer_class", name);
  }

  void check_name(const Json& json, const char* key, const char* wanted) const {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) return;
    const std::string name = found->is_object() ? found->at("content").get<std::string>() : found->get<std::string>();
    if (name != wanted) refuse(fmt::format("{} is '{}', and lockstep's {}", key, printable(name), wanted));
  }

  std::int64_t number_of(const Json& json) const {
    const auto number = whole_number(json, kMostAddedTokens);
    if (!number) refuse("an added token has no number");
    return static_cast<std::int64_t>(*number);
  }

  // A name, or an object with one.
  void take_added(const Json& token, std::int64_t number) {
    const bool plain = token.is_string();
    const std::string name = plain ? token.get<std::string>() : token.at("content").get<std::string>();
    if (name.empty()) refuse(fmt::format("the added token {} has no name", number));
    if (!plain) {
      for (const char* key : {"lstrip", "rstrip", "single_word"})
        if (flag(token, key) == true) refuse_setting(key, fmt::format("true of '{}'", name));
      // GPT-2 does not write texts in another way before it looks for tokens: to it that means nothing.
      if (kind_ == TokenizerKind::kBert && flag(token, "normalized") == true)
        refuse_setting("normalized", fmt::format("true of '{}'", name));
    }
    const auto same = std::ranges::find(to_.added, name, &TokenizerFiles::Token::name);
    if (same == to_.added.end())
      to_.added.push_back({name, number});
    else if (same->number != number)
      refuse(fmt::format("'{}' is the token {} and {}", printable(name), same->number, number));
  }

  std::string path_;
  TokenizerKind kind_;
  TokenizerFiles& to_;
};

}  // namespace

namespace {

void read_if_there(const std::string& path, const std::function<void(std::string_view)>& parse) {
  std::error_code none;
  if (fs::exists(path, none)) parse(MappedFile(path).text());
}

}  // namespace

TokenizerFiles read_tokenizer_files(const std::string& vocabulary, TokenizerKind kind) {
  return parse_tokenizer_files(vocabulary, kind, read_if_there);
}

TokenizerFiles read_tokenizer_file(const std::string& vocabulary, TokenizerKind kind) {
  const auto read = [&](const std::string& path, const std::function<void(std::string_view)>& parse) {
    read_if_there(fs::path(path).filename() == "tokenizer.json" ? vocabulary : path, parse);
  };
  return parse_tokenizer_files(vocabulary, kind, read);
}

TokenizerFiles parse_tokenizer_files(const std::string& vocabulary, TokenizerKind kind, const ReadFile& read_file) {
  TokenizerFiles files;
  const auto read = [&](const char* name, void (TokenizerReader::*take_from)(const Json&)) {
    const std::string path = (fs::path(vocabulary).parent_path() / name).string();
    read_file(path, [&](std::string_view text) { TokenizerReader(path, kind, files).read(text, take_from); });
  };
  read("tokenizer_config.json", &TokenizerReader::take_config);
  read("tokenizer.json", &TokenizerReader::take_tokenizer);
  read("added_tokens.json", &TokenizerReader::take_list);
  std::ranges::sort(files.added, {}, &TokenizerFiles::Token::number);
  return files;
}

void append_added_tokens(const TokenizerFiles& files, std::vector<std::string>& pieces, const std::string& vocabulary) {
  for (const auto& [name, number] : files.added) {
    const auto at = static_cast<std::int64_t>(pieces.size());
    const bool known = number >= 0 && number < at;
    if (number < 0 || number > at || (known && pieces[static_cast<std::size_t>(number)] != name))
      throw IoError(
          fmt::format("{} of {} gives '{}' the number {}, {}", files.source, vocabulary, printable(name), number,
                      known ? fmt::format("which is that of '{}'", printable(pieces[static_cast<std::size_t>(number)]))
                            : fmt::format("and the next one would be {}", at)),
          "take the files that belong to the vocabulary");
    if (number == at) pieces.push_back(name);
  }
}

void AddedTokens::add(std::string name, std::int32_t token) {
  LOCKSTEP_ASSERT(!name.empty());
  if (first_.find(name[0]) == std::string::npos) first_ += name[0];
  tokens_.emplace_back(std::move(name), token);
  std::ranges::stable_sort(tokens_, std::ranges::greater(), [](const auto& each) { return each.first.size(); });
}

std::vector<std::string> AddedTokens::names() const {
  std::vector<std::string> all;
  for (const auto& [name, token] : tokens_) all.push_back(name);
  return all;
}

void AddedTokens::cut(std::string_view text, const std::function<void(std::string_view)>& on_text,
                      const std::function<void(std::int32_t)>& on_token) const {
  std::size_t begin = 0, at = 0;  // of what is no name so far; where one may begin
  while ((at = text.find_first_of(first_, at)) != std::string_view::npos) {
    const auto found =
        std::ranges::find_if(tokens_, [&](const auto& each) { return text.substr(at).starts_with(each.first); });
    if (found == tokens_.end()) {
      ++at;
      continue;
    }
    if (at > begin) on_text(text.substr(begin, at - begin));
    on_token(found->second);
    begin = at += found->first.size();
  }
  if (begin < text.size()) on_text(text.substr(begin));
}

}  // namespace lockstep::data
