// Which build this is.
#pragma once

namespace lockstep {

const char* version();       // "0.1.0"
const char* git_revision();  // "a1b2c3d4e5f6", with "-dirty" for uncommitted changes; "unknown" outside git
const char* build_type();    // "Release"
const char* compiler();      // "GNU 12.2.0"
const char* cuda_targets();  // compute capabilities that kernels were compiled for: "8.0, 9.0, 10.0 or later"

}  // namespace lockstep
