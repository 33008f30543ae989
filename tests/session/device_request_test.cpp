#include "session/device_choice.h"

#include <gmock/gmock.h>

#include "base/error.h"

namespace lockstep::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = DeviceRequest::Kind;

TEST(ParseDevice, ValidRequests) {
  EXPECT_EQ(parse_device("auto").kind, Kind::kAuto);
  EXPECT_EQ(parse_device("cpu").kind, Kind::kCpu);
  EXPECT_THAT(parse_device("cpu").indices, IsEmpty());
  EXPECT_EQ(parse_device("cpu:2,0").kind, Kind::kCpu);
  EXPECT_THAT(parse_device("cpu:2,0").indices, ElementsAre(2, 0));
  const auto all = parse_device("cuda");
  EXPECT_EQ(all.kind, Kind::kCuda);
  EXPECT_THAT(all.indices, IsEmpty());
  EXPECT_FALSE(all.most_free);
  EXPECT_THAT(parse_device("cuda:2").indices, ElementsAre(2));
  const auto listed = parse_device("cuda:3,0,12");
  EXPECT_EQ(listed.kind, Kind::kCuda);
  EXPECT_THAT(listed.indices, ElementsAre(3, 0, 12));
  const auto free = parse_device("cuda:free");
  EXPECT_EQ(free.kind, Kind::kCuda);
  EXPECT_TRUE(free.most_free);
}

std::string complaint(const std::string& text) {
  try {
    parse_device(text);
  } catch (const UsageError& error) {
    EXPECT_FALSE(error.remedy().empty()) << text;
    return error.line();
  }
  ADD_FAILURE() << text << " is taken for a device";
  return "";
}

TEST(ParseDevice, InvalidRequests) {
  EXPECT_THAT(complaint("tpu"), HasSubstr("unknown device 'tpu'"));
  EXPECT_THAT(complaint("cud"), HasSubstr("did you mean 'cuda'?"));
  EXPECT_THAT(complaint("gpu"), HasSubstr("did you mean 'cuda'?"));
  EXPECT_THAT(complaint("gpu:1"), HasSubstr("did you mean 'cuda'?"));
  EXPECT_THAT(complaint("CPU"), HasSubstr("unknown device 'CPU'"));
  for (const char* text : {"cpu:", "cpu:x", "cpu:0,", "cpu:-1"})
    EXPECT_THAT(complaint(text), HasSubstr("is no number of a CPU device")) << text;
  EXPECT_THAT(complaint(""), HasSubstr("unknown device ''"));
  for (const char* text : {"cuda:", "cuda:x", "cuda:-1", "cuda:0,", "cuda:,0", "cuda:0,,1", "cuda:1.0", "cuda:0x1",
                           "cuda:4096", "cuda:99999999999999999999", "cuda: 0", "cuda:0,free"})
    EXPECT_THAT(complaint(text), HasSubstr("is no number of a GPU")) << text;
}

}  // namespace
}  // namespace lockstep::session
