#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "report/report.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(WithoutSecrets, NamesHeadersAddressesAndWhatIsKnown) {
  for (const auto& [text, safe] : {
           std::pair("LOCKSTEP_JOB_SECRET=abc123", "LOCKSTEP_JOB_SECRET=(removed)"),
           {"WANDB_API_KEY: 0123abc next", "WANDB_API_KEY: (removed) next"},
           {R"x({"hf_token":"x-y","lr":"0.1"})x", R"x({"hf_token":"(removed)","lr":"0.1"})x"},
           {"db_password = hunter2, x", "db_password = (removed), x"},
           {"Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer (removed)"},
           {"get http://me:pass@host/x", "get http://me:(removed)@host/x"},
           {"used AKIAABCDEFGHIJKLMNOP here", "used (removed) here"},
           {"tokens 5 keys 7\n\nsteps=3\n", "tokens 5 keys 7\n\nsteps=3\n"},
       })
    EXPECT_EQ(without_secrets(text), safe);
  const std::string lengthy(std::size_t{1} << 20, 'a');
  EXPECT_EQ(without_secrets(lengthy), lengthy) << "no stack is large enough for an expression over all of it";
  for (std::size_t before = 4070; before < 4100; ++before)
    EXPECT_THAT(without_secrets(std::string(before, 'a') + ",MY_TOKEN=abcdef"), HasSubstr("MY_TOKEN=(removed)"));
}

TEST(Bugreport, PacksWhatIsThereAndOverwritesNothing) {
  testing::TemporaryDirectory directory;
  const std::string output = directory.path("b.zip");
  EXPECT_THROW(bugreport({.run = directory.path("none"), .output = output}, "v"), IoError);
  EXPECT_THROW(bugreport({.run = directory.path(), .output = output}, "v"), IoError) << "nothing is in it";
  directory.write("rank-0.log", std::string(std::size_t{3} << 20, 'x') + "\nMY_TOKEN=abcdef\n");
  directory.write("other.bin", "x");
  const std::string printed = bugreport({.run = directory.path(), .output = output}, "v");
  EXPECT_THAT(printed, AllOf(HasSubstr("rank-0.log (2.1 MB)"), HasSubstr("version.txt"), HasSubstr("host.txt"),
                             Not(HasSubstr("other.bin"))));
  EXPECT_EQ(testing::read_file(output).substr(0, 2), "PK");
  EXPECT_THROW(bugreport({.run = directory.path(), .output = output}, "v"), UsageError);
}

}  // namespace
}  // namespace lockstep::report
