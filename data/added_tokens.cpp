#include "data/added_tokens.h"

#include <algorithm>

#include "base/error.h"

namespace lockstep::data {

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
