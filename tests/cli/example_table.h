// A small table with every kind of option, for the tests of this room.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/option_sources.h"
#include "cli/option_table.h"
#include "cli/values.h"

namespace lockstep::cli {

struct Example {
  std::string model, data, hosts, save, exports;
  std::optional<int> batch, global_batch;
  std::int64_t steps = 0;
  int ranks = 0;
  double lr = 0.5;
  std::string optimizer = "adamw";
  std::vector<int> hidden;
  std::pair<double, double> betas = {0.9, 0.999};
  bool quiet = false;
  int seed = 0;
};

/// `example` must outlive the table.
inline OptionTable example_table(Example& example, bool takes_program = true) {
  OptionTable table("example", "Does nothing.");
  table.positional({"MODEL", "its name", text(example.model)});
  if (takes_program) table.takes_program();
  table.group("Sizes");
  table.add({.name = "batch",
             .synonyms = {"batch-size"},
             .placeholder = "B",
             .help = "samples",
             .default_text = "32",
             .set = integer(example.batch, 1, 1000)});
  table.add({.name = "global-batch", .placeholder = "G", .set = integer(example.global_batch, 1, 1000)});
  table.exclusive({"batch", "global-batch"});
  table.add(
      {.name = "np", .synonyms = {"n", "nproc-per-node"}, .placeholder = "N", .set = integer(example.ranks, 1, 64)});
  table.add({.name = "hosts", .synonyms = {"H"}, .placeholder = "A:4,B:4", .set = text(example.hosts)});
  table.add({.name = "steps", .synonyms = {"max-steps"}, .placeholder = "S", .set = integer(example.steps, 1, 100)});
  table.group("Rest");
  table.add({.name = "optimizer",
             .synonyms = {"opt"},
             .placeholder = "sgd|adamw",
             .set = choice(example.optimizer, {{"sgd", std::string("sgd")}, {"adamw", std::string("adamw")}})});
  table.add({.name = "lr", .placeholder = "X", .set = number(example.lr, {.low = -10, .high = 10})});
  table.add({.name = "betas",
             .kind = OptionKind::kList,
             .placeholder = "A,B",
             .set = number_pair(example.betas, {.low = 0, .high = 1})});
  table.add(
      {.name = "hidden", .kind = OptionKind::kList, .placeholder = "N,N,…", .set = integers(example.hidden, 1, 5000)});
  table.add({.name = "data", .placeholder = "DATA", .set = text(example.data)});
  table.add({.name = "save", .placeholder = "FILE", .set = text(example.save)});
  table.add({.name = "export", .kind = OptionKind::kRepeatable, .placeholder = "NAME,…", .set = text(example.exports)});
  table.add({.name = "quiet", .kind = OptionKind::kFlag, .set = boolean(example.quiet)});
  table.exclusive({"quiet", "save"});
  table.add({.name = "seed", .placeholder = "N", .set = integer(example.seed, 0, 100)});
  table.applicability([&example](const std::string& name, bool typed) -> std::optional<Complaint> {
    const bool applies = name == "np"     ? example.optimizer == "adamw"
                         : name == "seed" ? example.optimizer == "sgd" || !typed
                                          : true;
    if (applies) return std::nullopt;
    return Complaint{"it applies to others", "leave it out"};
  });
  add_config_option(table);
  return table;
}

}  // namespace lockstep::cli
