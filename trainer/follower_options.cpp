// Who looks at a run from outside.
#include "options/values.h"
#include "trainer/options.h"

namespace lockstep::trainer {

using options::Applies;
using options::integer;
using options::kMost;
using options::text;
using options::when;

void add_follower_options(OptionTable& table, TrainConfig& config) {
  table.add({.name = "tensorboard",
             .placeholder = "DIR",
             .help = "directory for measurements, settings and histograms that TensorBoard shows",
             .value = text(config.tensorboard)});
  table.add({.name = "histogram-steps",
             .placeholder = "N",
             .help = "steps between histograms, in TensorBoard, of each parameter and of its gradient over the global "
                     "batch, before clipping; 0: none",
             .default_text = fmt::to_string(config.histogram_steps),
             .value = integer(config.histogram_steps, 0, kMost),
             .applies = {.to = "--tensorboard DIR, without --zero, --local-sgd and --clip-value",
                         .unless = [&config]() -> std::optional<std::string> {
                           if (config.tensorboard.empty()) return "there is none";
                           if (config.zero > 0) return "--zero leaves a rank the gradients of its part";
                           if (config.local_sgd > 0) return "--local-sgd leaves each rank gradients of its own";
                           return when(config.clip_value > 0, "--clip-value changes gradients where they lie");
                         }},
             .agree = Agree::kValue,
             .may_change = true});
  table.add({.name = "status-port",
             .placeholder = "PORT",
             .help = "port where rank 0 serves /metrics, for Prometheus, and /healthz while it trains; 0: a free one, "
                     "which is printed",
             .value = integer(config.status_port, 0, 65535)});
  const Applies to_status = {.to = "--status-port PORT",
                             .unless = [&config] { return when(!config.status_port, "there is none"); }};
  table.add({.name = "status-address",
             .placeholder = "ADDRESS",
             .help = "address of this host to serve at, 0.0.0.0 for all of them; others than loopback need a token",
             .default_text = "loopback",
             .value = text(config.status_address),
             .applies = to_status});
  table.add({.name = "status-token-file",
             .placeholder = "FILE",
             .help = "file with the token that who asks has to send (Authorization: Bearer TOKEN)",
             .default_text = "the variable LOCKSTEP_STATUS_TOKEN",
             .value = text(config.status_token_file),
             .applies = to_status});
}

}  // namespace lockstep::trainer
