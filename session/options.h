// What a session takes, as options.
#pragma once

#include <string>

#include "lockstep/session/session.h"
#include "options/table.h"

namespace lockstep::session {

/// Device, backend, threads, timeouts, encryption; opens a group.
void add_device_options(options::OptionTable& table, SessionOptions& session);

// One by one, for commands that take some.
/// For collectives of host memory.
void add_backend_option(options::OptionTable& table, std::string& backend);
void add_timeout_option(options::OptionTable& table, double& seconds);
void add_stall_option(options::OptionTable& table, double& seconds);
options::Option encrypt_option(bool& encrypt);
options::Option precision_option(Precision& precision, const char* help);
options::Option tf32_option(bool& tf32, const std::string& device);
options::Option log_level_option(std::string& level, const char* help);

/// Whether `device` names the CPU; and for messages, "this run has --device cpu".
bool is_on_cpu(const std::string& device);
std::string device_text(const std::string& device);
/// What options are for that GPUs alone have; `device` is read when a run is checked, and must live on.
options::Applies to_gpus(const std::string& device);

}  // namespace lockstep::session
