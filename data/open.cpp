#include "lockstep/data/families.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::data {

const DatasetFamily& digits_family();
const DatasetFamily& mnist_family();
const DatasetFamily& cifar10_family();
const DatasetFamily& cifar100_family();
const DatasetFamily& images_family();
const DatasetFamily& tar_family();
const DatasetFamily& text_family();
const DatasetFamily& texts_family();
const DatasetFamily& csv_family();
const DatasetFamily& table_family();
const DatasetFamily& npy_family();
const DatasetFamily& tokens_family();
const DatasetFamily& random_family();

namespace {

Registry<DatasetFamily>& dataset_registry() {
  static Registry<DatasetFamily> data_sets(
      "data set", {&digits_family(), &mnist_family(), &cifar10_family(), &cifar100_family(), &images_family(),
                   &tar_family(), &text_family(), &csv_family(), &texts_family(), &table_family(), &npy_family(),
                   &tokens_family(), &random_family()});
  return data_sets;
}

std::string written(const DatasetFamily& family) {
  return family.argument.empty() ? family.name : fmt::format("{}:{}", family.name, family.argument);
}

std::string known_data() {
  std::vector<std::string> all;
  for (const auto* family : dataset_families()) all.push_back(written(*family));
  return "known data: " + join(all, ", ");
}

std::string what_is(const std::string& argument) {
  if (argument == "DIR") return "a directory";
  if (argument == "FILE") return "a file";
  return argument == "SHAPE,LEN" ? "a shape and a length" : argument;
}

void check_settings(const DatasetFamily& family, const Settings& given) {
  for (const auto& [name, value] : given) {
    if (find_setting(family.settings, name) != nullptr) continue;
    std::vector<std::string> takers;
    for (const auto* other : dataset_families())
      if (find_setting(other->settings, name) != nullptr) takers.push_back(other->name);
    throw UsageError(fmt::format("--{} for the data set {}", name, family.name),
                     takers.empty() ? fmt::format("no data set has a setting '{}'", name)
                                    : fmt::format("leave it out: it is for {}", listed(takers)));
  }
}

}  // namespace

const std::vector<const DatasetFamily*>& dataset_families() { return dataset_registry().all(); }

void register_dataset(DatasetFamily family) {
  check_usage(family.open != nullptr, "a data set without a way to open it", "give DatasetFamily::open");
  dataset_registry().add(std::move(family));
}

const DatasetFamily* find_dataset_family(const std::string& spec) {
  return dataset_registry().find(spec.substr(0, spec.find(':')));
}

std::string dataset_argument(const std::string& spec) {
  const auto colon = spec.find(':');
  return colon == std::string::npos ? "" : spec.substr(colon + 1);
}

DataSplits open_data(const std::string& spec, const OpenOptions& options) {
  if (options.classes < 0) throw UsageError(fmt::format("{} classes", options.classes), "give --classes 1 or more");
  const DatasetFamily* const family = find_dataset_family(spec);
  if (family == nullptr) {
    const auto meant = nearest(spec.substr(0, spec.find(':')), dataset_registry().names());
    throw UsageError(fmt::format("unknown data '{}'", spec),
                     meant ? fmt::format("did you mean '{}'? {}", *meant, known_data()) : known_data());
  }
  check_settings(*family, options.settings);
  const std::string argument = dataset_argument(spec);
  if (family->argument.empty() && spec != family->name)
    throw UsageError(fmt::format("data '{}': {} takes no argument", spec, family->name), "write " + family->name);
  if (!family->argument.empty() && argument.empty())
    throw UsageError(fmt::format("data '{}' needs {}", spec, what_is(family->argument)),
                     fmt::format("write {}{}", written(*family), family->remedy.empty() ? "" : ", " + family->remedy));
  OpenOptions whole = options;
  whole.settings = resolve(family->settings, options.settings, "data " + family->name);
  if (whole.classes == 0) whole.classes = family->classes;
  if (whole.classes < family->classes)
    throw UsageError(fmt::format("{} has {} classes, {} were asked for", family->name, family->classes, whole.classes),
                     fmt::format("leave --classes out, or give {} or more", family->classes));
  DataSplits splits = family->open(spec, argument, whole);
  if (family->test_validates && options.parts.test) splits.test = splits.validation;
  return splits;
}

std::string dataset_help() {
  std::vector<std::string> all;
  for (const auto* family : dataset_families()) all.push_back(fmt::format("{} ({})", written(*family), family->about));
  return listed(all, "or");
}

std::vector<SettingSpec> augment_settings() {
  using Role = SettingSpec::Role;
  const SettingNeed augmented = {.what = "--augment yes",
                                 .otherwise = "training samples are read unchanged",
                                 .holds = [](const Settings& all) { return all.flag(kAugment); }};
  std::vector<SettingSpec> settings = {
      {.name = kAugment,
       .fallback = true,
       .help = "crop and mirror training samples at random",
       .placeholder = "yes|no",
       .default_text = "yes"},
      {.name = kRandAugment,
       .fallback = {0, 0},
       .help = "N operations of RandAugment, of magnitude M from 0 to 30, on the pixels of each training sample",
       .role = Role::kAugmentation,
       .high = 30,
       .placeholder = "N,M",
       .default_text = "none",
       .least_many = 2,
       .most_many = 2,
       .neutral = SettingValue({0, 0}),
       .need = augmented},
      {.name = kErasing,
       .fallback = 0.0,
       .help = "probability that a rectangle of a training sample becomes zeros",
       .role = Role::kAugmentation,
       .high = 1,
       .placeholder = "P",
       .neutral = 0.0,
       .need = augmented}};
  const auto mixing = mixing_settings();
  settings.insert(settings.end(), mixing.begin(), mixing.end());
  return settings;
}

}  // namespace lockstep::data
