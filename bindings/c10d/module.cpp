// What Python sees of it: lockstep_c10d._C.create().
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <utility>
#include <vector>

#include "bindings/c10d/backend.h"

namespace {

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         std::vector<int> job_ranks, double timeout_seconds, bool encrypt,
                                         double stall_warning_seconds) {
  lockstep::pytorch::Backend::Settings settings;
  settings.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * timeout_seconds));
  settings.job_ranks = std::move(job_ranks);
  settings.encrypt = encrypt;
  settings.stall_warning_seconds = stall_warning_seconds;
  return c10::make_intrusive<lockstep::pytorch::Backend>(store, rank, size, settings);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("create", create, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("job_ranks"),
             py::arg("timeout_seconds"), py::arg("encrypt"), py::arg("stall_warning_seconds"),
             py::call_guard<py::gil_scoped_release>());
}
