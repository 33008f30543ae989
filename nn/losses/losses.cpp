#include "lockstep/nn/losses/losses.h"

#include "base/error.h"
#include "base/text.h"

namespace lockstep::nn {

const LossFamily& cross_entropy_family();

const LossFamily& squared_error_family();

namespace {

std::vector<const LossFamily*>& registry() {
  static std::vector<const LossFamily*> families = {
      &cross_entropy_family(),  //
      &squared_error_family(),
  };
  return families;
}

std::deque<LossFamily>& own_families() {
  static std::deque<LossFamily> own;
  return own;
}

}  // namespace

const std::vector<const LossFamily*>& loss_families() { return registry(); }

void register_loss(LossFamily family) {
  check_usage(family.make != nullptr, "a loss without a way to make it", "give LossFamily::make");
  check_family_name("loss", family.name);
  const auto is_same = [name = family.name](const LossFamily& one) { return one.name == name; };
  if (find_family(loss_families(), family.name) != nullptr && std::ranges::none_of(own_families(), is_same))
    throw UsageError(fmt::format("a second loss named '{}'", family.name), "choose another name");
  register_family(registry(), own_families(), std::move(family), is_same);
}

const LossFamily& usual_loss() { return cross_entropy_family(); }

std::vector<std::string> loss_names() { return names_of(loss_families()); }

const LossFamily& loss_family(const std::string& name) { return family_named("loss", loss_families(), name); }

LossFunction make_loss(const LossFamily& family, const Settings& settings) {
  return family.make(resolve(family.settings, settings, "loss " + family.name));
}

}  // namespace lockstep::nn
