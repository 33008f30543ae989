#include "base/error.h"

#include <system_error>

namespace lockstep {

std::string Error::line() const { return remedy_.empty() ? what() : fmt::format("{} → {}", what(), remedy_); }

void fail_assertion(const char* condition, const std::string& detail, std::source_location where) {
  throw InternalError(fmt::format("internal error at {}:{}: {}{}{}", where.file_name(), where.line(), condition,
                                  detail.empty() ? "" : ": ", detail),
                      "this is a bug in lockstep; please report it with the command line", where);
}

std::string errno_text(int error_number) { return std::generic_category().message(error_number); }

}  // namespace lockstep
