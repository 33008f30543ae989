// The config.json beside weights: settings that are read are in their ranges.
#include "checkpoint/model_metadata.h"
#include "lockstep/nn/models/models.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  for (const char* const name : {"llama", "gpt", "bert"})
    fuzz::parse([&] {
      const auto specs = nn::model_family(name).settings_of(name);
      const std::string text(fuzz::text_of(data, size));
      for (const auto& [setting, value] : checkpoint::read_config_file(text, "input", {.name = name, .settings = {}}))
        if (complaint_about(*find_setting(specs, setting), value)) std::abort();
    });
  return 0;
}
