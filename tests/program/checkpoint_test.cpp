// Runs that stop and resume.
#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <iterator>

#include "tests/program/command.h"
#include "tests/program/events.h"
#include "tests/support/free_port.h"
#include "tests/support/json.h"

namespace lockstep::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

std::string hash_of(const fs::path& path) {
  const auto events = events_of(read_file(path));
  if (events.empty() || events.back()["event"] != "final") return "no end in " + path.string();
  return events.back()["params_sha256"];
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

std::string step_name(int step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(10 - digits.size(), '0') + digits;
}

void remove_after(const fs::path& directory, int step) {
  for (const auto& name : names_in(directory))
    if (name > step_name(step)) fs::remove_all(directory / name);
}

void write_text(const fs::path& directory) {
  std::ofstream text(directory / "text.txt");
  for (int i = 0; i < 200; ++i) text << "every " << i * i % 97 << " ";
}

// How many lines of a text say `what`.
std::ptrdiff_t lines_that_say(const std::string& what, const std::string& text) {
  return std::ranges::count_if(lines_of(text), [&](const auto& line) { return line.find(what) != std::string::npos; });
}

constexpr const char* kCnn =
    "lockstep train cnn --data digits --global-batch 60 --steps 40 --optimizer sgd --lr 0.05 --quiet --threads 1 "
    "--metrics m.jsonl --checkpoint-dir c ";

struct Case {
  const char* what;
  const char* command;
  int steps, ranks;
};

class Resumed : public ::testing::TestWithParam<Case> {};

// From checkpoints that a run leaves, another comes to the same bits.
TEST_P(Resumed, MatchesAnUninterruptedRun) {
  const TemporaryDirectory directory;
  write_text(directory.path());
  const std::string line = on_ranks(GetParam().ranks) + GetParam().command +
                           " --quiet --check-replicas 1 --metrics m.jsonl --checkpoint-dir c --keep 0";
  run_well(line + " --checkpoint-every 3", directory.path());
  const std::string whole = hash_of(directory.path() / "m.jsonl");
  const auto names = names_in(directory.path() / "c");
  EXPECT_EQ(names.size(), static_cast<std::size_t>((GetParam().steps + 2) / 3));
  for (int step = GetParam().steps / 3 * 3; step > 0; step -= 12) {
    remove_after(directory.path() / "c", step);
    run_well(line + " --checkpoint-every 0 --resume auto", directory.path());
    EXPECT_EQ(hash_of(directory.path() / "m.jsonl"), whole) << "from step " << step;
    EXPECT_EQ(events_of(directory.path() / "m.jsonl", "resume").back()["step"], step);
    EXPECT_EQ(events_of(directory.path() / "m.jsonl", "step").size(), static_cast<std::size_t>(GetParam().steps));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Training, Resumed,
    ::testing::Values(
        Case{"MomentumCosineClip",
             "lockstep train cnn --data digits --global-batch 60 --steps 40 --optimizer sgd --lr 0.05 "
             "--schedule cosine --warmup 4 --clip-norm 1 --weight-decay 0.01 --bucket-mb 0.001 --first-bucket-mb 0.001",
             40, 2},
        Case{"AdamWAndDropout",
             "lockstep train lstm --data text:text.txt --width 16 --context 8 --layers 2 --dropout 0.3 --batch 4 "
             "--steps 15 --schedule step",
             15, 2},
        Case{"StateOfAGru",
             "lockstep train gru --data text:text.txt --width 16 --context 8 --layers 2 --dropout 0.3 --global-batch 9 "
             "--stateful --steps 33",
             33, 2},
        Case{"StateOfAnLstmOnMoreRanks",
             "lockstep train lstm --data text:text.txt --width 16 --context 16 --layers 2 --global-batch 7 --stateful "
             "--tail drop --steps 27 --threads 1",
             27, 3},
        Case{"DropoutOfATransformer",
             "lockstep train gpt --data text:text.txt --width 16 --heads 2 --layers 2 --context 8 --dropout 0.2 "
             "--batch 4 --steps 15",
             15, 1},
        Case{"ScalesOfFp16",
             "lockstep train cnn --data digits --global-batch 60 --steps 15 --comm-hook fp16 --bucket-mb 0.001", 15, 2},
        Case{"ErrorsOfPowerSgd", "lockstep train cnn --data digits --global-batch 50 --steps 15 --comm-hook powersgd:2",
             15, 3},
        Case{"ErrorsOfTopK",
             "lockstep train gpt --data text:text.txt --width 16 --heads 2 --layers 2 --context 8 --batch 4 --steps 15 "
             "--comm-hook topk:3",
             15, 2},
        Case{"MixedSamples",
             "lockstep train cnn --data digits --mixup 0.4 --cutmix 1 --label-smoothing 0.1 --global-batch 60 --steps "
             "33",
             33, 2},
        Case{"PaddedTail", "lockstep train mlp --hidden 16 --data digits --batch 100 --tail pad --steps 33", 33, 3},
        Case{"DataParallel",
             "lockstep train cnn --data digits --parallel dp --device cpu:0,1,2 --batch 50 --steps 20 --clip-norm 1",
             20, 1}),
    [](const auto& one) { return std::string(one.param.what); });

// What a model carries from row to row is in the checkpoint, of all ranks; other numbers of ranks resume it.
TEST(Checkpoints, CarriedStateResumesOnOtherRanks) {
  const TemporaryDirectory directory;
  write_text(directory.path());
  const std::string line =
      "lockstep train rnn --data text:text.txt --width 16 --context 8 --global-batch 6 --stateful --steps 24 --lr 0.01 "
      "--threads 1 --quiet --metrics m.jsonl --checkpoint-dir c --checkpoint-every 11 --keep 0 ";
  const auto losses = [&] {
    std::vector<double> all;
    for (const auto& event : events_of(directory.path() / "m.jsonl", "step")) all.push_back(event["loss"]);
    return all;
  };
  run_well(on_ranks(2) + line, directory.path());
  const auto whole = losses();
  ASSERT_EQ(whole.size(), 24u);
  for (const int n : {3, 1, 7}) {
    remove_after(directory.path() / "c", 11);
    run_well(on_ranks(n) + line + "--resume auto", directory.path());
    const auto again = losses();
    ASSERT_EQ(again.size(), whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i)
      EXPECT_NEAR(again[i], whole[i], 1e-4 * whole[i]) << n << " ranks, step " << i + 1;
  }
  // It is another run than one without, and needs the file.
  remove_after(directory.path() / "c", 11);
  std::string shuffled = line;
  shuffled.replace(shuffled.find("--stateful "), 11, "");
  EXPECT_THAT(run(shuffled + "--resume auto", directory.path()), fails_with(6, "stateful true there"));
  const fs::path file = directory.path() / "c" / step_name(11) / "carried.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_THAT(run(line + "--resume c/" + step_name(11), directory.path()), fails_with(6, "carried.safetensors"));
  fs::remove(file);
  EXPECT_THAT(run(on_ranks(2) + line + "--resume auto", directory.path()), fails_with(6, "carried.safetensors"));
}

TEST(Checkpoints, BuffersComeBackToo) {
  const TemporaryDirectory directory;
  const std::string data = "resnet18-cifar --data random:3x8x8,24 ";
  const std::string line = on_ranks(2) + "lockstep train " + data + "--batch 4 --steps 5 --nesterov --quiet --keep 0 ";
  run_well(line + "--save whole.safetensors --checkpoint-dir c --checkpoint-every 4", directory.path());
  remove_after(directory.path() / "c", 4);
  run_well(line + "--save again.safetensors --checkpoint-dir c --resume auto", directory.path());
  run_well("cmp whole.safetensors again.safetensors", directory.path());
  // What is in a checkpoint is a weights file like any other.
  const std::string weights = "c/" + step_name(5) + "/weights.safetensors";
  run_well("cmp whole.safetensors " + weights, directory.path());
  run_well("lockstep eval " + data + "--weights " + weights, directory.path());
}

TEST(Checkpoints, AnotherNumberOfRanksContinuesWithTheRemainingSamples) {
  const TemporaryDirectory directory;
  const std::string line = std::string(kCnn) + "--checkpoint-every 5 --keep 0 ";
  run_well(on_ranks(2) + line, directory.path());
  std::vector<double> whole;
  for (const auto& event : events_of(directory.path() / "m.jsonl", "step")) whole.push_back(event["loss"]);
  for (const int n : {3, 1}) {
    remove_after(directory.path() / "c", 15);  // in the middle of an epoch of 24
    const auto outcome = run_well(on_ranks(n) + line + "--resume auto", directory.path());
    EXPECT_THAT(outcome.err, HasSubstr("ranks 2 there and " + std::to_string(n) + " here"));
    const auto events = events_of(directory.path() / "m.jsonl", "step");
    ASSERT_EQ(events.size(), whole.size());
    // Other samples would be off by far more than rounding.
    for (std::size_t i = 0; i < whole.size(); ++i)
      EXPECT_NEAR(events[i]["loss"].get<double>(), whole[i], 1e-4 * whole[i]) << n << " ranks, step " << i + 1;
  }
}

TEST(Checkpoints, TheNewestAreKeptAndTheRestIsRemoved) {
  const TemporaryDirectory directory;
  run_well(std::string(kCnn) + "--checkpoint-every 7 --keep 2", directory.path());
  EXPECT_EQ(names_in(directory.path() / "c"), (std::vector{step_name(35), step_name(40)}));
  // There is nothing more to do, and that is done again.
  const std::string hash = hash_of(directory.path() / "m.jsonl");
  run_well(std::string(kCnn) + "--resume auto", directory.path());
  EXPECT_EQ(hash_of(directory.path() / "m.jsonl"), hash);
  EXPECT_EQ(events_of(directory.path() / "m.jsonl", "final").size(), 1u);
  // And a run may become longer.
  EXPECT_EQ(run(std::string(kCnn) + "--resume auto --keep 1 --checkpoint-every 6 --metrics n.jsonl --steps 45",
                directory.path())
                .code,
            2);  // two --steps
  std::string longer = kCnn;
  longer.replace(longer.find("--steps 40"), 10, "--steps 45");
  run_well(longer + "--resume auto --keep 1 --checkpoint-every 6", directory.path());
  EXPECT_EQ(names_in(directory.path() / "c"), std::vector{step_name(45)});
  EXPECT_EQ(events_of(directory.path() / "m.jsonl", "step").size(), 45u);
}

TEST(Checkpoints, BytesThatAreCutOrChangedAreFound) {
  const TemporaryDirectory directory;
  const std::string line = std::string(kCnn) + "--checkpoint-every 10 --keep 0 ";
  run_well(line, directory.path());
  const std::string whole = hash_of(directory.path() / "m.jsonl");
  const auto path = [&](int step, const char* file) { return directory.path() / "c" / step_name(step) / file; };
  fs::resize_file(path(40, "weights.safetensors"), 1000);
  {
    std::fstream changed(path(30, "optimizer.safetensors"), std::ios::in | std::ios::out | std::ios::binary);
    changed.seekg(5000);
    const char flipped = static_cast<char>(changed.get() ^ 1);
    changed.seekp(5000);
    changed.put(flipped);
  }
  fs::resize_file(path(20, "card.json"), 300);
  auto outcome = run_well(line + "--resume auto", directory.path());
  for (const auto& file :
       {step_name(40) + "/weights.safetensors", step_name(30) + "/optimizer.safetensors", step_name(20) + "/card.json"})
    EXPECT_THAT(outcome.err, HasSubstr(file + " cannot be used"));
  EXPECT_EQ(hash_of(directory.path() / "m.jsonl"), whole);
  EXPECT_EQ(events_of(directory.path() / "m.jsonl", "resume").back()["step"], 10);
  // They have been replaced.
  outcome = run_well(line + "--resume auto", directory.path());
  EXPECT_THAT(outcome.err, Not(HasSubstr("cannot be used")));
  outcome = run_well("lockstep checkpoint verify c", directory.path());
  EXPECT_EQ(lines_of(outcome.out).size(), 4u);
  outcome = run_well("lockstep checkpoint show c", directory.path());
  EXPECT_THAT(outcome.out, HasSubstr("step 40 of 40, in epoch 2 after 960 samples of it"));
  // Names, not numbers, with blanks after the longest of them.
  for (const char* setting :
       {"\n  schedule         constant\n", "\n  label-smoothing  0\n", "\n  tail             exact\n"})
    EXPECT_THAT(outcome.out, HasSubstr(setting));
  // None that is whole, and one that is asked for by name.
  for (const auto& name : names_in(directory.path() / "c"))
    fs::remove(directory.path() / "c" / name / "optimizer.safetensors");
  EXPECT_THAT(run(line + "--resume auto", directory.path()), fails_with(6, "none of the 4 checkpoints in c is whole"));
  EXPECT_THAT(run("lockstep checkpoint verify c", directory.path()),
              fails_with(6, "4 of 4 checkpoints cannot be used"));
  EXPECT_THAT(run(line + "--resume c/" + step_name(20), directory.path()),
              fails_with(6, "optimizer.safetensors cannot be used: it is missing"));
}

TEST(Checkpoints, OfAnotherRunAreRefused) {
  const TemporaryDirectory directory;
  run_well(
      "lockstep train mlp --hidden 8 --data random:6,50 --batch 8 --steps 10 --quiet --checkpoint-dir c "
      "--checkpoint-every 5",
      directory.path());
  for (const BadInput& input : bad_inputs(R"(
6 lockstep train mlp --quiet --checkpoint-dir c --resume auto
  --hidden 9 --data random:6,50 --batch 8 --steps 10 | sizes hidden 8 there and hidden 9 here
  --hidden 8 --data random:6,60 --batch 8 --steps 10 | samples
  --hidden 8 --data random:6,50 --batch 8 --steps 10 --seed 2 | seed 1 there and 2 here
  --hidden 8 --data random:6,50 --batch 4 --steps 10 | add --global-batch 8
  --hidden 8 --data random:6,50 --batch 8 --steps 10 --optimizer sgd
    | optimizer adamw there and sgd with momentum here
  --hidden 8 --data random:6,50 --batch 8 --steps 10 --ema 0.9 | moving average none there and 0.9 here
  --hidden 8 --data random:6,50 --batch 8 --steps 7 | is of step 10, and this run ends at step 7
6 lockstep train linear --data random:6,50
  --batch 8 --steps 10 --quiet --checkpoint-dir c --resume auto | model mlp there and linear here
  --steps 1 --resume nowhere | nowhere is no checkpoint
2 lockstep train linear --data random:6,50
  --steps 1 --resume auto | add --checkpoint-dir
  --steps 1 --checkpoint-every 3 | add --checkpoint-dir
6 lockstep train mlp --hidden 8 --data random:6,50 --batch 8 --steps 10 --quiet
  --checkpoint-dir c | add --resume auto
  --checkpoint-dir c --resume c/step-0000000005 | has a checkpoint of step 10
)"))
    EXPECT_EQ(lines_of(expect_refused(input, directory.path()).err).size(), 1u) << input.line;
  // Not overwritten, and resumed from the middle only elsewhere.
  EXPECT_EQ(run_well("lockstep train mlp --hidden 8 --data random:6,50 --batch 8 --steps 10 --quiet --resume c/" +
                         step_name(5) + " --checkpoint-dir other",
                     directory.path())
                .err,
            "");
  EXPECT_EQ(names_in(directory.path() / "c"), (std::vector{step_name(5), step_name(10)}));
}

TEST(Checkpoints, OfOtherDataAreRefused) {
  const TemporaryDirectory directory;
  const auto complaint = [&](const std::string& command, int code = 6) {
    const auto outcome = run(command + " --quiet 2>&1", directory.path());
    EXPECT_EQ(outcome.code, code) << command << outcome.out;
    return outcome.out;
  };
  // Classes that have changed places: what was learned of one would be said of the other.
  run_well(
      "mkdir -p images/{ants,bees}; for c in ants bees; do for i in 0 1 2 3 4 5 6 7 8 9; do "
      "cp " LOCKSTEP_SOURCE_DIR "/tests/data/golden/grey.png images/$c/$i.png; done; done",
      directory.path());
  const std::string images = "lockstep train linear --data images:images --image-size 8 --batch 4 --checkpoint-dir c ";
  complaint(images + "--steps 5", 0);
  complaint(images + "--steps 6 --resume auto", 0);
  run_well("mv images/ants images/wasps", directory.path());
  EXPECT_THAT(complaint(images + "--steps 7 --resume auto"),
              AllOf(HasSubstr("class 0 is 'ants' there and 'bees' here, and 1 more differ"),
                    HasSubstr("add --resume-data-changed")));
  EXPECT_THAT(complaint(images + "--steps 7 --resume auto --resume-data-changed", 0),
              HasSubstr("training continues on these"));
  EXPECT_THAT(complaint(images + "--steps 8 --resume auto", 0), Not(HasSubstr("other data")));
  EXPECT_THAT(complaint(images + "--steps 9 --resume auto --resume-data-changed", 0), Not(HasSubstr("other data")));
  EXPECT_THAT(complaint(images + "--steps 9 --resume-data-changed", 2), HasSubstr("this one does not resume"));
  // A text of as many characters, of which one is another.
  const std::string text =
      "lockstep train gpt --layers 1 --width 16 --heads 1 --context 8 --data text:t.txt --batch 4 --checkpoint-dir t ";
  run_well("for i in $(seq 40); do echo the quick brown fox; done >t.txt", directory.path());
  complaint(text + "--steps 2", 0);
  run_well("sed -i s/q/Q/ t.txt", directory.path());
  for (const char* changed : {"", " --resume-data-changed"})
    EXPECT_THAT(complaint(text + "--steps 3 --resume auto" + changed),
                HasSubstr("the alphabet has 'q' there and 'Q' here"));
  run_well("sed -i -e s/Q/q/ -e 20s/fox/xof/ t.txt", directory.path());
  EXPECT_THAT(complaint(text + "--steps 3 --resume auto"), HasSubstr("1 of 64 digests of its samples are others"));
}

// Waits until the metrics file has `lines` lines, then does `what` to process $pid, the last one that was started.
std::string once_there_are(int lines, const std::string& what) {
  return " & pid=$!; for i in $(seq 3000); do [[ $(cat m.jsonl 2>/dev/null | wc -l) -ge " + std::to_string(lines) +
         " ]] && break; sleep 0.01; done; " + what + "; wait $pid";
}

std::string endless(const std::string& line) {
  std::string made = line;
  made.replace(made.find("--steps 40"), 10, "--epochs 100000");
  return made;
}

TEST(Checkpoints, ADirectoryIsOneRunsAtATime) {
  const TemporaryDirectory directory;
  const std::string endless =
      "lockstep train mlp --data digits --steps 100000000 --quiet --threads 1 --checkpoint-every 0 --checkpoint-dir c ";
  const auto outcome =
      run(endless +
              "--metrics first.jsonl & until grep -q event.:.step first.jsonl 2>/dev/null; do sleep 0.05; "
              "done; " +
              endless +
              "--resume auto --metrics second.jsonl; echo second $?; "
              "kill -TERM $!; wait $!; echo first $?",
          directory.path());
  EXPECT_THAT(outcome.out, HasSubstr("second 2\nfirst 75\n")) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("another training writes its checkpoints to c: host "));
  EXPECT_EQ(names_in(directory.path() / "c").size(), 1u) << "no lock is left";
}

TEST(Checkpoints, AFullDiskDoesNotStopTraining) {
  const TemporaryDirectory directory;
  // From some step on no file may be larger than 150,000 bytes.
  std::string line = kCnn;
  line.replace(line.find("--steps 40"), 10, "--steps 400");
  const auto outcome =
      run(line + "--checkpoint-every 5 --keep 0" + once_there_are(30, "prlimit --pid $pid --fsize=150000"),
          directory.path());
  ASSERT_EQ(outcome.code, 3) << outcome.err;  // it is done, and whoever runs it until it is saved is not content
  EXPECT_THAT(outcome.err, HasSubstr("training is complete, but its last checkpoint, of step 400, is not in c"));
  EXPECT_THAT(hash_of(directory.path() / "m.jsonl"), Not(HasSubstr("no end")));
  EXPECT_EQ(lines_that_say("File too large", outcome.err), 2) << outcome.err;  // once, and at the end
  EXPECT_THAT(outcome.err, HasSubstr("training continues, and the newest checkpoint is of step"));
  const auto names = names_in(directory.path() / "c");
  EXPECT_LT(names.back(), step_name(400));
  for (const auto& name : names) EXPECT_THAT(name, Not(HasSubstr("new")));
  run_well(line + "--resume auto", directory.path());
}

TEST(Checkpoints, ADirectoryThatCannotBeWrittenDoesNotStopTraining) {
  const TemporaryDirectory directory;
  run_well(std::string(kCnn) + "--checkpoint-every 20", directory.path());
  remove_after(directory.path() / "c", 20);
  fs::rename(directory.path() / "c", directory.path() / "d");
  const std::string elsewhere = "--resume d --checkpoint-dir ";
  std::string line = kCnn;
  line.erase(line.find("--checkpoint-dir"));
  // Whoever is root may write where others may not, but not there.
  const auto outcome =
      run(on_ranks(2) + line + elsewhere + "/sys/lockstep-checkpoints --save s.safetensors", directory.path());
  ASSERT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.err,
              HasSubstr("error: training is complete, but its last checkpoint, of step 40, is not in /sys"));
  EXPECT_TRUE(fs::exists(directory.path() / "s.safetensors"));
  EXPECT_THAT(outcome.err, HasSubstr("cannot create /sys/lockstep-checkpoints"));
  EXPECT_THAT(outcome.err, HasSubstr("training continues"));
  EXPECT_THAT(outcome.err, HasSubstr("could not be written"));
  EXPECT_EQ(events_of(directory.path() / "m.jsonl", "step").size(), 40u);
}

TEST(Checkpoints, ADirectoryThatHasBecomeReadOnlyKeepsWhatItHas) {
  const TemporaryDirectory directory;
  run_well(std::string(kCnn) + "--checkpoint-every 20", directory.path());
  const fs::path folder = directory.path() / "c";
  remove_after(folder, 20);
  fs::permissions(folder, fs::perms::owner_read | fs::perms::owner_exec);
  // Root writes wherever it likes, unless it gives up that right.
  const std::string as_others =
      ::geteuid() == 0 ? "setpriv --bounding-set=-dac_override --inh-caps=-dac_override " : "";
  const auto outcome = run(as_others + kCnn + "--checkpoint-every 5 --resume auto", directory.path());
  fs::permissions(folder, fs::perms::owner_all);
  ASSERT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(lines_that_say("Permission denied", outcome.err), 2) << outcome.err;  // once, and at the end
  EXPECT_THAT(outcome.err, HasSubstr("training continues"));
  EXPECT_EQ(names_in(folder), std::vector<std::string>{step_name(20)});
  run_well(std::string(kCnn) + "--checkpoint-every 20 --resume auto", directory.path());
}

TEST(Checkpoints, AStopSavesOneAndExitsWith75) {
  for (const int n : {1, 2}) {
    const TemporaryDirectory directory;
    const std::string line = (n == 1 ? "" : "lockstep launch -n 2 -- ") + endless(kCnn) + "--checkpoint-every 0";
    EXPECT_THAT(run(line + once_there_are(20, "kill -TERM $pid"), directory.path()),
                fails_with(75, "--resume auto resumes it"));
    const auto steps = events_of(directory.path() / "m.jsonl", "step");
    ASSERT_GE(steps.size(), 19u);
    EXPECT_EQ(names_in(directory.path() / "c"), std::vector{step_name(steps.back()["step"])});
    EXPECT_EQ(events_of(directory.path() / "m.jsonl", "final").size(), 0u);
  }
}

TEST(Checkpoints, StopThatCannotBeSavedExitsWithTheSignal) {
  const TemporaryDirectory directory;
  std::string line = endless(kCnn);
  line.replace(line.find("--checkpoint-dir c"), 18, "--checkpoint-dir /sys/lockstep-checkpoints");
  EXPECT_THAT(run(line + "--checkpoint-every 0" + once_there_are(20, "kill -TERM $pid"), directory.path()),
              fails_with(128 + SIGTERM, "without a checkpoint of it"));
}

TEST(Checkpoints, OneRankThatIsAskedToStopIsEnough) {
  const TemporaryDirectory directory;
  const auto rank = [port = std::to_string(free_port())](int number) {
    return "MASTER_PORT=" + port + " WORLD_SIZE=2 RANK=" + std::to_string(number) + " " + endless(kCnn) +
           "--checkpoint-every 0 ";
  };
  const auto outcome =
      run(rank(0) + "& first=$!; " + rank(1) + once_there_are(20, "kill -USR1 $pid") + "; echo $?; wait $first",
          directory.path());
  EXPECT_EQ(outcome.code, 75) << outcome.err;
  EXPECT_EQ(outcome.out, "75\n");
  EXPECT_EQ(names_in(directory.path() / "c").size(), 1u);
}

TEST(Checkpoints, AStopDuringAnEvaluationDoesNotWaitForItsEnd) {
  const TemporaryDirectory directory;
  // Six steps, and an evaluation that takes minutes; then it comes first.
  const std::string line =
      "lockstep train cnn --data random:1x96x96,600000 --batch 1 --eval-every 0 --steps 6 --quiet --metrics m.jsonl "
      "--checkpoint-dir c --checkpoint-every 0 ";
  auto outcome = run(line + once_there_are(6, "sleep 0.3; kill -TERM $pid"), directory.path());
  ASSERT_EQ(outcome.code, 75) << outcome.err;
  EXPECT_EQ(names_in(directory.path() / "c"), std::vector{step_name(6)});
  // Once it would take the signal for a wish to stop; without a step there is nothing else to see.
  outcome = run(line +
                    "--resume auto & pid=$!; until (( 0x$(grep SigCgt /proc/$pid/status | cut -f2) & 0x4000 )); do "
                    "sleep 0.05; done; sleep 2; kill -TERM $pid; wait $pid",
                directory.path());
  EXPECT_EQ(outcome.code, 75) << outcome.err;
  EXPECT_EQ(events_of(directory.path() / "m.jsonl", "step").size(), 6u);
}

}  // namespace
}  // namespace lockstep::testing
