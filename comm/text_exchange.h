// Short texts among all ranks, without an arena.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/op.h"

namespace lockstep::comm {

/// An allgather of one text a rank, in memory of its own: for what a group must know before it has an arena.
class TextExchange {
 public:
  static constexpr std::size_t kTextBytes = 256;  // with its end

  TextExchange(int rank, int size)
      : rank_(rank), texts_(std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(size) * kTextBytes)) {}

  /// The operation that spreads `mine`, shorter than kTextBytes; one at a time.
  Op begin(const std::string& mine);
  /// Every rank's, in rank order, when it is complete.
  std::vector<std::string> all() const;

  /// Where the texts are: for an exchange that does not end.
  std::shared_ptr<void> memory() const { return texts_; }

 private:
  int rank_;
  std::shared_ptr<std::vector<std::byte>> texts_;
};

}  // namespace lockstep::comm
