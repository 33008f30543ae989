// A config file, with options of all kinds.
#include "cli/option_sources.h"
#include "cli/values.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::cli;
  const std::string path = lockstep::fuzz::file_of(data, size);
  return lockstep::fuzz::parse([&] {
    std::string word;
    int batch = 0;
    double lr = 0;
    bool quiet = false;
    std::vector<int> hidden;
    std::pair<double, double> betas;
    OptionTable table("train", "Trains.");
    table.add({.name = "data", .placeholder = "DATA", .set = lockstep::cli::text(word)});
    table.add({.name = "batch", .synonyms = {"b"}, .placeholder = "B", .set = integer(batch, 1, 1000)});
    table.add({.name = "lr", .placeholder = "X", .set = number(lr, {})});
    table.add({.name = "quiet", .kind = OptionKind::kFlag, .set = boolean(quiet)});
    table.add({.name = "hidden", .kind = OptionKind::kList, .placeholder = "N,…", .set = integers(hidden, 1, 99)});
    table.add({.name = "betas", .kind = OptionKind::kList, .placeholder = "A,B", .set = number_pair(betas, {})});
    table.add(
        {.name = "export", .kind = OptionKind::kRepeatable, .placeholder = "NAME,…", .set = lockstep::cli::text(word)});
    table.exclusive({"quiet", "batch"});
    table.applicability([&](const std::string& name, bool) -> std::optional<Complaint> {
      if (name == "betas" && lr > 1) return Complaint{"it applies to others", "leave it out"};
      return std::nullopt;
    });
    add_config_option(table);
    parse_options(table, {{"--config", path}, [](const std::string&) { return std::nullopt; }, {}},
                  {{"hosts", "launch"}});
  });
}
