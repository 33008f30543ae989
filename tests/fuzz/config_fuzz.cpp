// A config file, with options of all kinds.
#include "options/sources.h"
#include "options/values.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::options;
  const std::string path = lockstep::fuzz::file_of(data, size);
  return lockstep::fuzz::parse([&] {
    std::string word;
    int batch = 0;
    double lr = 0;
    bool quiet = false;
    lockstep::Settings settings;
    const lockstep::SettingSpec hidden = {.name = "hidden", .fallback = {3}, .help = "", .low = 1, .high = 99};
    const lockstep::SettingSpec betas = {
        .name = "betas", .fallback = {0.9, 0.999}, .help = "", .least_many = 2, .most_many = 2};
    OptionTable table("train", "Trains.");
    table.add({.name = "data", .placeholder = "DATA", .value = lockstep::options::text(word)});
    table.add({.name = "batch", .synonyms = {"b"}, .placeholder = "B", .value = integer(batch, 1, 1000)});
    table.add({.name = "lr", .placeholder = "X", .value = number(lr, {})});
    table.add({.name = "quiet", .kind = OptionKind::kFlag, .value = boolean(quiet)});
    table.add({.name = "hidden", .kind = OptionKind::kList, .placeholder = "N,…", .value = setting(settings, hidden)});
    table.add({.name = "betas",
               .kind = OptionKind::kList,
               .placeholder = "A,B",
               .value = setting(settings, betas),
               .applies = {.to = "others", .unless = [&]() -> std::optional<std::string> {
                             if (lr > 1) return "this is another";
                             return std::nullopt;
                           }}});
    table.add({.name = "export",
               .kind = OptionKind::kRepeatable,
               .placeholder = "NAME,…",
               .value = lockstep::options::text(word)});
    table.exclusive({"quiet", "batch"});
    add_config_option(table);
    parse_options(table, {{"--config", path}, [](const std::string&) { return std::nullopt; }, {}},
                  {{"hosts", "launch"}});
  });
}
