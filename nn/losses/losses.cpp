#include "lockstep/nn/losses/losses.h"

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

std::vector<std::string> loss_names() { return names_of(loss_families()); }

const LossFamily& loss_family(const std::string& name) { return family_named("loss", loss_families(), name); }

LossFunction make_loss(const LossFamily& family, const Settings& settings) {
  return family.make(resolve(family.settings, settings, "loss " + family.name));
}

}  // namespace lockstep::nn
