#include "trainer/layer_trace.h"

namespace lockstep::trainer {

LayerTrace::LayerTrace(Trace& trace, const nn::Module& module) : trace_(trace) {
  for (const auto& [name, parameter] : module.named_parameters()) layers_[parameter] = name.substr(0, name.rfind('.'));
}

void LayerTrace::op_ended(const nn::OpLabel& label, bool backward) {
  const auto end = Clock::now();
  const void* const identity = label.parameter != nullptr ? static_cast<const void*>(label.parameter) : label.op;
  std::string_view& name = names_[{identity, backward}];
  if (name.empty()) {
    const auto layer = layers_.find(label.parameter);
    const std::string prefix = layer != layers_.end() ? layer->second + " " : "";
    name = trace_.keep(prefix + label.op + (backward ? " backward" : ""));
  }
  trace_.span(Trace::kComputation, name, begin_, end);
}

}  // namespace lockstep::trainer
