// Any bytes that a client may send to the status server: a request that is whole is so in whatever pieces it comes.
#include "tests/fuzz/fuzz.h"
#include "trainer/http_request.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = lockstep::fuzz::text_of(data, size);
  const auto request = lockstep::trainer::parse_http_request(bytes);
  if (request.status == 200 && (request.method.empty() || !request.path.starts_with('/'))) std::abort();
  if (request.status == 0 && bytes.size() > lockstep::trainer::kMostRequestBytes) std::abort();
  const auto first = lockstep::trainer::parse_http_request(bytes.substr(0, bytes.size() / 2));
  if (first.status != 0 && first.status != request.status) std::abort();
  return 0;
}
