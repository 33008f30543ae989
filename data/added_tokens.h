// Tokens that are no words: a text has them where their names stand.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::data {

class AddedTokens {
 public:
  /// A name once; not empty.
  void add(std::string name, std::int32_t token);
  std::vector<std::string> names() const;

  /// Calls on_text(part) for what lies between names, if anything, and on_token(token) for each name, in their order.
  /// Of names that begin at one place the longest counts, as with Hugging Face.
  void cut(std::string_view text, const std::function<void(std::string_view)>& on_text,
           const std::function<void(std::int32_t)>& on_token) const;

 private:
  std::vector<std::pair<std::string, std::int32_t>> tokens_;  // the longest first
  std::string first_;                                         // what they begin with
};

}  // namespace lockstep::data
