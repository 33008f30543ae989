// Training on a folder of images, as people call it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Images : public ::testing::Test {
 protected:
  Images() {
    const fs::path golden = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/data/golden";
    for (const char* name : {"grey", "coloured"}) {
      fs::create_directories(directory_.path() / "pictures" / name);
      for (int i = 0; i < 10; ++i) {
        const std::string source = name == std::string("grey") ? (i % 2 == 0 ? "grey.jpg" : "grey.png")
                                                               : (i % 2 == 0 ? "rgb420.jpg" : "rgb.png");
        fs::copy_file(golden / source, directory_.path() / "pictures" / name / (std::to_string(i) + source));
      }
    }
  }
  Outcome train(const std::string& options, int ranks = 1, const std::string& data = "images:pictures") const {
    return run(on_ranks(ranks) + "lockstep train resnet18 --data " + data +
                   " --image-size 32 --global-batch 6 --quiet --metrics m.jsonl " + options,
               directory_.path(), 120);
  }
  // The losses of all steps.
  std::vector<double> losses() const { return read_metrics(directory_.path() / "m.jsonl").losses; }
  void corrupt(const std::string& file) const {
    const fs::path folder = directory_.path() / "pictures" / "coloured";
    std::ofstream(folder / file) << "\xff\xd8\xff and no more";
  }

  TemporaryDirectory directory_;
};

TEST_F(Images, AResNetTrainsOnThem) {
  ended_well(train("--steps 3"));
  const auto first = losses();
  EXPECT_EQ(first.size(), 3u);
  ended_well(train("--steps 3 --workers 3"));
  EXPECT_EQ(losses(), first);
  ended_well(train("--steps 3 --augment no"));
  EXPECT_NE(losses(), first);
}

TEST_F(Images, ArchivesTrainTheSameModelAsFolders) {
  const fs::path all = directory_.path();
  for (const char* part : {"train", "val"}) {
    fs::create_directories(all / "parts");
    fs::copy(all / "pictures", all / "parts" / part, fs::copy_options::recursive);
    fs::create_directories(all / "samples");
    int number = 0;
    for (const std::string name : {"coloured", "grey"}) {
      std::vector<fs::path> files;
      for (const auto& entry : fs::directory_iterator(all / "pictures" / name)) files.push_back(entry.path());
      std::ranges::sort(files);
      for (const fs::path& file : files) {
        const std::string key = std::to_string(100 + number++);
        fs::copy_file(file, all / "samples" / (key + file.extension().string()));
        std::ofstream(all / "samples" / (key + ".cls")) << (name == "grey" ? 1 : 0);
      }
    }
    ended_well(run(std::string("tar --sort=name -C samples -cf set-") + part + "-000.tar .", all, 20));
    fs::remove_all(all / "samples");
  }
  ended_well(train("--steps 4 --shards 3 --tail drop", 1, "images:parts"));
  const auto folders = losses();
  ended_well(train("--steps 4 --shards 3 --tail drop --workers 2", 3, "tar:."));
  EXPECT_EQ(losses(), folders);
  ended_well(train("--steps 2 --shards 3 --tail drop --checkpoint-dir c", 2, "tar:."));
  ended_well(train("--steps 4 --shards 3 --tail drop --checkpoint-dir c --resume auto", 3, "tar:."));
  EXPECT_EQ(losses(), folders);  // of both runs
}

TEST_F(Images, CorruptImagesAreNamedAndCounted) {
  corrupt("0rgb420.jpg");
  corrupt("2rgb420.jpg");
  const auto outcome = ended_well(train("--epochs 1", 2));
  EXPECT_THAT(outcome.err + outcome.out, HasSubstr("coloured/0rgb420.jpg"));
  EXPECT_THAT(outcome.err + outcome.out, HasSubstr("coloured/2rgb420.jpg"));
  EXPECT_THAT(outcome.err + outcome.out, HasSubstr("took their places"));
  EXPECT_THAT(train("--epochs 1 --max-corrupt 1"), fails_with(3, "2 images are corrupt"));
}

}  // namespace
}  // namespace lockstep::testing
