#include "nn/losses/losses.h"

#include "base/text.h"

namespace lockstep::nn {

const LossFamily& cross_entropy_family();

const std::vector<const LossFamily*>& loss_families() {
  static const std::vector<const LossFamily*> families = {
      &cross_entropy_family(),
  };
  return families;
}

const LossFamily& usual_loss() { return cross_entropy_family(); }

std::vector<std::string> loss_names() {
  std::vector<std::string> names;
  for (const auto* family : loss_families()) names.push_back(family->name);
  return names;
}

const LossFamily& loss_family(const std::string& name) {
  for (const auto* family : loss_families())
    if (family->name == name) return *family;
  throw_unknown("loss", name, loss_names());
}

LossFunction make_loss(const LossFamily& family, const Settings& settings) {
  return family.make(resolve(family.settings, settings, "loss " + family.name));
}

}  // namespace lockstep::nn
