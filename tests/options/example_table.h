// A small table with every kind of option, for the tests of this module.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "options/sources.h"
#include "options/table.h"
#include "options/values.h"

namespace lockstep::options {

struct Example {
  std::string model, data, hosts, save, exports;
  std::optional<int> batch, global_batch;
  std::int64_t steps = 0;
  int ranks = 0;
  double lr = 0.5;
  std::string optimizer = "adamw";
  Settings settings = {{"betas", {0.9, 0.999}}};
  bool quiet = false;
  int seed = 0;
};

/// Two numbers from 0 to 1: "betas".
inline SettingSpec pair_of_numbers() {
  return {.name = "betas", .fallback = {0.9, 0.999}, .help = "", .high = 1, .least_many = 2, .most_many = 2};
}
/// "hidden".
inline SettingSpec whole_numbers(double low, double high) {
  return {.name = "hidden", .fallback = {3}, .help = "", .low = low, .high = high};
}

/// `example` must outlive the table.
inline OptionTable example_table(Example& example, bool takes_program = true) {
  const auto applies = [&example](const char* optimizer) -> Applies {
    return {.to = "others", .unless = [&example, optimizer]() -> std::optional<std::string> {
              if (example.optimizer == optimizer) return std::nullopt;
              return "this is " + example.optimizer;
            }};
  };
  OptionTable table("example", "Does nothing.");
  table.positional({"MODEL", "its name", text(example.model)});
  if (takes_program) table.takes_program();
  table.group("Sizes");
  table.add({.name = "batch",
             .synonyms = {"batch-size"},
             .placeholder = "B",
             .help = "samples",
             .default_text = "32",
             .value = integer(example.batch, 1, 1000)});
  table.add({.name = "global-batch", .placeholder = "G", .value = integer(example.global_batch, 1, 1000)});
  table.exclusive({"batch", "global-batch"});
  table.add({.name = "np",
             .synonyms = {"n", "nproc-per-node"},
             .placeholder = "N",
             .value = integer(example.ranks, 1, 64),
             .applies = applies("adamw")});
  table.add({.name = "hosts", .synonyms = {"H"}, .placeholder = "A:4,B:4", .value = text(example.hosts)});
  table.add({.name = "steps", .synonyms = {"max-steps"}, .placeholder = "S", .value = integer(example.steps, 1, 100)});
  table.group("Rest");
  table.add({.name = "optimizer",
             .synonyms = {"opt"},
             .placeholder = "sgd|adamw",
             .value = choice(example.optimizer, {{"sgd", std::string("sgd")}, {"adamw", std::string("adamw")}})});
  table.add({.name = "lr", .placeholder = "X", .value = number(example.lr, {.low = -10, .high = 10})});
  table.add({.name = "betas",
             .kind = OptionKind::kList,
             .placeholder = "A,B",
             .value = setting(example.settings, pair_of_numbers())});
  table.add({.name = "hidden",
             .kind = OptionKind::kList,
             .placeholder = "N,N,…",
             .value = setting(example.settings, whole_numbers(1, 5000))});
  table.add({.name = "data", .placeholder = "DATA", .value = text(example.data)});
  table.add({.name = "save", .placeholder = "FILE", .value = text(example.save)});
  table.add(
      {.name = "export", .kind = OptionKind::kRepeatable, .placeholder = "NAME,…", .value = text(example.exports)});
  table.add({.name = "quiet", .kind = OptionKind::kFlag, .value = boolean(example.quiet)});
  table.exclusive({"quiet", "save"});
  Applies sgds = applies("sgd");
  sgds.forget = [] {};
  table.add({.name = "seed", .placeholder = "N", .value = integer(example.seed, 0, 100), .applies = sgds});
  add_config_option(table);
  return table;
}

}  // namespace lockstep::options
