#include <algorithm>
#include <map>
#include <queue>
#include <set>
#include <utility>

#include "base/error.h"
#include "data/word_pieces.h"

namespace lockstep::data {
namespace {

constexpr std::size_t kMostCharacters = 1000;
constexpr std::int64_t kLeastOften = 2;

using Pair = std::pair<std::int32_t, std::int32_t>;

// The characters of `word`, as pieces: all but the first with "##".
std::vector<std::string> single_pieces(std::string_view word) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < word.size();) {
    std::size_t length = 1;
    while (at + length < word.size() && (static_cast<unsigned char>(word[at + length]) & 0xC0u) == 0x80u) ++length;
    all.push_back((at == 0 ? "" : "##") + std::string(word.substr(at, length)));
    at += length;
  }
  return all;
}

std::string_view character_of(std::string_view piece) {
  return piece.size() > 2 && piece.starts_with("##") ? piece.substr(2) : piece;
}

/// A mark of a script without capitals, or a character of one that has marks.
bool is_kept(char32_t code) {
  // Marks of any script, and those of the scripts that have capitals.
  constexpr std::pair<char32_t, char32_t> kAccents[] = {{0x300, 0x36F},   {0x483, 0x487},   {0x1AB0, 0x1AFF},
                                                        {0x1DC0, 0x1DFF}, {0x20D0, 0x20FF}, {0x2DE0, 0x2DFF},
                                                        {0xA66F, 0xA69F}, {0xFE20, 0xFE2F}};
  if (kind_of(code) == CharacterKind::kMark)
    return std::ranges::none_of(kAccents, [code](const auto& b) { return code >= b.first && code <= b.second; });
  return !has_case(decomposed(code).codes[0]);
}

// Words as rows of pieces, and how often each two neighbours are there.
class Joining {
 public:
  Joining(const std::map<std::string, std::int64_t>& words, std::size_t size) : size_(size) {
    pieces_.assign(kSpecialPieces.begin(), kSpecialPieces.end());
    take_characters(words);
    for (const auto& [word, count] : words) take_word(word, count);
    for (const auto& [pair, count] : counts_) queue_.push({count, pair});
  }

  std::vector<std::string> run() {
    while (pieces_.size() < size_ && !queue_.empty()) {
      const Entry best = queue_.top();
      queue_.pop();
      const std::int64_t now = counts_[best.pair];
      if (now != best.count) {  // it has changed since
        if (now >= kLeastOften) queue_.push({now, best.pair});
        continue;
      }
      if (now < kLeastOften) break;
      join(best.pair);
    }
    return std::move(pieces_);
  }

 private:
  struct Word {
    std::vector<std::int32_t> pieces;
    std::int64_t count;
  };
  struct Entry {
    std::int64_t count;
    Pair pair;
    // The most frequent first; of equally frequent ones that of the earlier pieces.
    bool operator<(const Entry& other) const { return count != other.count ? count < other.count : other.pair < pair; }
  };

  void take_characters(const std::map<std::string, std::int64_t>& words) {
    std::map<std::string, std::int64_t> often;  // of characters, wherever in a word they are
    std::map<std::string, std::set<std::string>> forms;
    for (const auto& [word, count] : words)
      for (const std::string& piece : single_pieces(word)) {
        const std::string character(character_of(piece));
        often[character] += count;
        forms[character].insert(piece);
      }
    std::vector<std::pair<std::int64_t, std::string>> order;
    for (const auto& [character, count] : often) order.emplace_back(-count, character);
    std::ranges::sort(order);
    if (order.size() > kMostCharacters) order.resize(kMostCharacters);
    std::set<std::string> kept;
    for (const auto& [count, character] : order) kept.insert(forms[character].begin(), forms[character].end());
    for (const std::string& piece : kept) {
      if (pieces_.size() >= size_) break;
      numbers_[piece] = static_cast<std::int32_t>(pieces_.size());
      pieces_.push_back(piece);
    }
  }

  void take_word(const std::string& word, std::int64_t count) {
    Word made{.pieces = {}, .count = count};
    for (const std::string& piece : single_pieces(word)) {
      const auto found = numbers_.find(piece);
      if (found == numbers_.end()) return;  // the word is [UNK] whatever is joined
      made.pieces.push_back(found->second);
    }
    const auto number = static_cast<std::uint32_t>(words_.size());
    for (std::size_t i = 0; i + 1 < made.pieces.size(); ++i) {
      const Pair pair(made.pieces[i], made.pieces[i + 1]);
      counts_[pair] += count;
      places_[pair].insert(number);
    }
    words_.push_back(std::move(made));
  }

  void join(const Pair& pair) {
    const std::string whole = pieces_[static_cast<std::size_t>(pair.first)] +
                              std::string(character_of(pieces_[static_cast<std::size_t>(pair.second)]));
    // Two pairs may make the same piece: "a" "##bc" and "ab" "##c".
    const auto [found, added] = numbers_.emplace(whole, static_cast<std::int32_t>(pieces_.size()));
    if (added) pieces_.push_back(whole);
    const std::int32_t joined = found->second;
    const std::set<std::uint32_t> places = std::move(places_[pair]);
    places_.erase(pair);
    std::set<Pair> grown;
    for (const std::uint32_t number : places) {
      Word& word = words_[number];
      for (std::size_t i = 0; i + 1 < word.pieces.size(); ++i)
        counts_[{word.pieces[i], word.pieces[i + 1]}] -= word.count;
      std::vector<std::int32_t> pieces;
      for (std::size_t i = 0; i < word.pieces.size(); ++i) {
        const bool here = i + 1 < word.pieces.size() && Pair(word.pieces[i], word.pieces[i + 1]) == pair;
        pieces.push_back(here ? joined : word.pieces[i]);
        if (here) ++i;
      }
      word.pieces = std::move(pieces);
      for (std::size_t i = 0; i + 1 < word.pieces.size(); ++i) {
        const Pair next(word.pieces[i], word.pieces[i + 1]);
        counts_[next] += word.count;
        places_[next].insert(number);
        if (next.first == joined || next.second == joined) grown.insert(next);
      }
    }
    for (const Pair& next : grown) queue_.push({counts_[next], next});
    counts_.erase(pair);
  }

  std::size_t size_;
  std::vector<std::string> pieces_;
  std::map<std::string, std::int32_t> numbers_;
  std::vector<Word> words_;
  std::map<Pair, std::int64_t> counts_;
  std::map<Pair, std::set<std::uint32_t>> places_;  // words that may have the pair
  std::priority_queue<Entry> queue_;
};

}  // namespace

WordPieceLearner::WordPieceLearner(bool cased)
    : tokenizer_(cased ? TextRules{.lower_case = false, .marks = TextRules::Marks::kKept}
                       : TextRules{.lower_case = true, .marks = TextRules::Marks::kLeftOutUnlessHeld},
                 is_kept) {
  for (const std::string_view name : kSpecialPieces) special_.add(std::string(name), 0);
}

void WordPieceLearner::add(std::string_view text, const std::string& source) {
  special_.cut(
      text,
      [&](std::string_view part) {
        tokenizer_.for_each_word(
            part, source, [&](std::string_view word) { ++words_[std::string(word)]; },
            static_cast<std::size_t>(part.data() - text.data()));
      },
      [](std::int32_t) {});
}

std::shared_ptr<const WordPieces> WordPieceLearner::learn(std::size_t size) const {
  const std::map<std::string, std::int64_t> sorted(words_.begin(), words_.end());
  WordPieceRules rules = {.lower_case = tokenizer_.rules().lower_case};
  return std::make_shared<const WordPieces>(Joining(sorted, size).run(), "a vocabulary of its own", std::move(rules));
}

}  // namespace lockstep::data
