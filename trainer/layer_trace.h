// Operators in the trace, by the names of their layers.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "nn/layers/module.h"
#include "trainer/trace.h"

namespace lockstep::trainer {

/// Records every operator of a tape, forward and backward, as "conv1 conv2d" and "conv1 conv2d backward"; those without
/// parameters go by the operator alone. The trace must outlive it.
class LayerTrace final : public nn::TapeObserver {
 public:
  LayerTrace(Trace& trace, const nn::Module& module);

  void op_begins() override { begin_ = Clock::now(); }
  void op_ended(const nn::OpLabel& label, bool backward) override;

 private:
  using Key = std::pair<const void*, bool>;  // a parameter or, of an operator without, its name; backward

  Trace& trace_;
  std::map<const nn::Parameter*, std::string> layers_;
  std::map<Key, std::string_view> names_;
  Clock::time_point begin_;
};

}  // namespace lockstep::trainer
