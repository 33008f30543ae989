#include "lockstep/nn/losses/losses.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::nn {

const LossFamily& cross_entropy_family();
const LossFamily& squared_error_family();

namespace {

Registry<LossFamily>& loss_registry() {
  static Registry<LossFamily> losses("loss", {&cross_entropy_family(), &squared_error_family()});
  return losses;
}

}  // namespace

const std::vector<const LossFamily*>& loss_families() { return loss_registry().all(); }

void register_loss(LossFamily family) {
  check_usage(family.make != nullptr, "a loss without a way to make it", "give LossFamily::make");
  loss_registry().add(std::move(family));
}

const LossFamily& usual_loss() { return cross_entropy_family(); }

std::vector<std::string> loss_names() { return loss_registry().names(); }

const LossFamily& loss_family(const std::string& name) { return loss_registry().named(name); }

LossFunction make_loss(const LossFamily& family, const Settings& settings) {
  return family.make(resolve(family.settings, settings, "loss " + family.name));
}

}  // namespace lockstep::nn
