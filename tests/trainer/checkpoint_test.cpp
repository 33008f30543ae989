#include "checkpoint/checkpoints.h"

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>

#include "base/error.h"
#include "lockstep/comm/make_group.h"
#include "lockstep/data/loader.h"
#include "lockstep/nn/models/models.h"
#include "tests/support/temporary_directory.h"
#include "trainer/build.h"
#include "trainer/checkpoint_parts.h"
#include "trainer/resume.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointManifest;
using checkpoint::CheckpointWriter;
using checkpoint::decode_checkpoint_manifest;
using checkpoint::Facts;
using checkpoint::kManifestFile;
using checkpoint::kOptimizerFile;
using checkpoint::kWeightsFile;
using checkpoint::list_checkpoints;
using checkpoint::newest_whole;
using checkpoint::prepare_checkpoints;
using checkpoint::prune_checkpoints;
using checkpoint::Resumed;
using checkpoint::Search;
using checkpoint::StateCopy;
using checkpoint::verify_checkpoint;
using checkpoint::write_checkpoint;
using ::testing::HasSubstr;

CheckpointManifest some_manifest() {
  CheckpointManifest manifest;
  manifest.step = 12;
  manifest.position = {.epoch = 3, .cursor = 40};
  manifest.optimizer_steps = 12;
  manifest.total_steps = 100;
  manifest.world_size = 2;
  manifest.identity = {{"model", "mlp"}, {"seed", "18446744073709551615"}};
  manifest.settings = {{"data", "images:/tmp/\"ä\""}};
  manifest.data = {{"class names", R"(["a","ä"])"}};
  manifest.buckets.order = {"fc2.weight", "fc1.weight"};
  manifest.files["weights.safetensors"] = {.bytes = 100, .sha256 = std::string(64, 'a')};
  return manifest;
}

CheckpointManifest manifest_of_parts() {
  CheckpointManifest manifest = some_manifest();
  manifest.parts = {{{"fc1.weight", {0, 2048}}, {"fc2.weight", {0, 10}}}, {}, {{"fc1.weight", {2048, 7}}}};
  return manifest;
}

TEST(CheckpointManifest, IsReadAsItWasWritten) {
  EXPECT_EQ(decode_checkpoint_manifest(encode(some_manifest()), "here"), some_manifest());
  EXPECT_THAT(encode(some_manifest()), HasSubstr("\"lockstep checkpoint 1\""));
  const CheckpointManifest parts = manifest_of_parts();
  EXPECT_EQ(decode_checkpoint_manifest(encode(parts), "here"), parts);
  EXPECT_THAT(encode(parts), HasSubstr("\"lockstep checkpoint 2\"")) << "versions that know of no parts refuse it";
  CheckpointManifest odd = some_manifest();
  odd.settings = {{"data", "text:\xff\xfe"}};  // a path may be anything
  EXPECT_NO_THROW(decode_checkpoint_manifest(encode(odd), "here"));
}

// What a run must have in common with the one that wrote a checkpoint, by the names and values that are on disk since
// the format is there: another spelling would refuse all of them.
TEST(CheckpointManifest, HasTheIdentityThatFilesHave) {
  TrainConfig config;
  config.model = {.name = "mlp", .settings = {{"hidden", {7, 8}}}};
  config.data = "digits";
  config.optimizer = "sgd";
  config.optimizer_settings = {{"momentum", 0.5}};
  config.freeze = "fc1.*";
  const CheckpointManifest plan = plan_of(config, *open_splits(config).train, 2, 100);
  EXPECT_THAT(plan.identity, ::testing::UnorderedElementsAreArray(Facts{{"model", "mlp"},
                                                                        {"sizes", "hidden 7,8"},
                                                                        {"samples", "1437"},
                                                                        {"sample", "[8, 8, 1]"},
                                                                        {"classes", "10"},
                                                                        {"augment", "yes"},
                                                                        {"seed", "1"},
                                                                        {"global batch", "64"},
                                                                        {"tail", "exact"},
                                                                        {"optimizer", "sgd with momentum"},
                                                                        {"frozen", "fc1.*"}}));
  for (const char* name :
       {"ranks",      "steps",    "lr",        "weight-decay",    "momentum",    "nesterov",     "data",
        "accumulate", "schedule", "warmup",    "clip-norm",       "parallel",    "precision",    "tf32",
        "autotune",   "graphs",   "bucket-mb", "first-bucket-mb", "find-unused", "static-graph", "label-smoothing"})
    EXPECT_THAT(plan.settings, ::testing::Contains(::testing::Pair(name, ::testing::_))) << name;
  // Those that such a run has no use for, whose defaults are others', are no difference between two of them.
  for (const char* name :
       {"betas", "eps", "min-lr", "end-factor", "no-broadcast-buffers", "sync-batchnorm", "dropout", "deterministic"})
    EXPECT_THAT(plan.settings, ::testing::Not(::testing::Contains(::testing::Pair(name, ::testing::_)))) << name;
  // The usual loss was the only one once, and files of that time say nothing of it.
  config.loss = nn::usual_loss().name;
  EXPECT_EQ(plan_of(config, *open_splits(config).train, 2, 100).identity, plan.identity);
  config.loss = "another";
  EXPECT_THAT(plan_of(config, *open_splits(config).train, 2, 100).identity,
              ::testing::Contains(::testing::Pair("loss", "another")));
  config.loss.clear();
  config.model = {.name = "gpt", .settings = {{"layers", 2}, {"tied", false}}};
  config.data = "random:tokens,40";
  config.optimizer.clear();
  config.optimizer_settings = {};
  const CheckpointManifest of_gpt = plan_of(config, *open_splits(config).train, 1, 100);
  for (const char* name : {"betas", "eps", "dropout"})
    EXPECT_THAT(of_gpt.settings, ::testing::Contains(::testing::Pair(name, ::testing::_))) << name;
  const Facts usual = of_gpt.identity;
  config.optimizer_settings = {{"eps", 1e-6}};
  EXPECT_EQ(plan_of(config, *open_splits(config).train, 1, 100).identity, usual);
  EXPECT_THAT(usual,
              ::testing::IsSupersetOf(Facts{{"sizes", "layers 2, heads 4, width 256, context 256, a head of its own"},
                                            {"optimizer", "adamw"}}));
}

// Nobody leads a reader to files elsewhere, or into memory that there is not: the seeds of its fuzz target.
TEST(CheckpointManifest, InvalidPartsAreRefused) {
  int refused = 0;
  for (const auto& entry : fs::directory_iterator(LOCKSTEP_SOURCE_DIR "/tests/fuzz/corpus/checkpoint")) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("parts-")) continue;
    std::ifstream in(entry.path());
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    try {
      decode_checkpoint_manifest(text, name);
      ADD_FAILURE() << name << " is accepted";
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(name + " cannot be used: ")) << "no digest that is wrong";
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("SHA-256")));
      ++refused;
    }
  }
  EXPECT_EQ(refused, 5);
}

TEST(CheckpointManifest, ReceiptsAreReadAsTheyWereWritten) {
  const CheckpointManifest::File file = {.bytes = 12345, .sha256 = std::string(64, 'b')};
  const std::string text = checkpoint::encode_receipt(file);
  EXPECT_EQ(checkpoint::decode_receipt(text), file);
  for (std::size_t length = 0; length < text.size(); ++length)
    EXPECT_FALSE(checkpoint::decode_receipt(text.substr(0, length))) << length;
  const std::string digest(64, 'b');
  for (const std::string& other : {digest + "  5\n", digest + " -5\n", digest + " 0\n", digest + " 5 \n",
                                   std::string(64, 'g') + " 5\n", digest + " 99999999999999999999\n"})
    EXPECT_FALSE(checkpoint::decode_receipt(other)) << other;
}

TEST(CheckpointManifest, TruncationAndChangedBytesAreDetected) {
  for (const CheckpointManifest& given : {some_manifest(), manifest_of_parts()}) {
    const std::string text = encode(given);
    for (std::size_t length = 0; length + 2 < text.size(); ++length)
      EXPECT_THROW(decode_checkpoint_manifest(text.substr(0, length), "here"), IoError) << length;
    int accepted = 0;
    for (std::size_t at = 0; at < text.size(); ++at) {
      std::string changed = text;
      changed[at] = static_cast<char>(changed[at] ^ 1);
      try {
        EXPECT_EQ(decode_checkpoint_manifest(changed, "here"), given) << at;  // no more than a blank
        ++accepted;
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr("here cannot be used"));
      }
    }
    EXPECT_LT(accepted, 10);
  }
}

// A small model and its optimizer, and a directory for their checkpoints.
class Folder : public ::testing::Test {
 protected:
  Folder() { fs::create_directory(path()); }

  std::string write(std::int64_t step) {
    StateCopy copy(*module_, *optimizer_);
    copy.take();
    write_checkpoint(path(), step, [&](const std::string& at) {
      CheckpointManifest manifest = some_manifest();
      manifest.step = step;
      manifest.files = copy.write(at, {});
      return manifest;
    });
    return list_checkpoints(path()).front().path;
  }
  std::string path() const { return directory_.path("c"); }
  std::vector<std::int64_t> steps() const {
    std::vector<std::int64_t> all;
    for (const auto& stored : list_checkpoints(path())) all.push_back(stored.step);
    return all;
  }

  lockstep::testing::TemporaryDirectory directory_;
  std::unique_ptr<nn::Backend> backend_ = nn::make_cpu_backend(1);
  nn::Generator generator_{1};
  nn::Context context_{*backend_, generator_};
  std::unique_ptr<nn::Module> module_ =
      nn::make_model(context_, {.name = "cnn", .sample_shape = {8, 8, 1}, .classes = 10});
  std::unique_ptr<nn::Optimizer> optimizer_ = nn::make_adamw(module_->named_parameters(), {});
};

TEST_F(Folder, EachFileIsCheckedFromItsFirstToItsLastByte) {
  const std::string newest = write(7);
  EXPECT_EQ(verify_checkpoint(newest).step, 7);
  for (const char* name : {kWeightsFile, kOptimizerFile, kManifestFile}) {
    const fs::path file = fs::path(newest) / name;
    const auto bytes = fs::file_size(file);
    for (const std::uintmax_t place : {std::uintmax_t{0}, bytes / 2, bytes - 3}) {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(static_cast<std::streamoff>(place));
      const char before = static_cast<char>(stream.get());
      stream.seekp(static_cast<std::streamoff>(place));
      stream.put(static_cast<char>(before ^ 0x11)).flush();
      try {
        verify_checkpoint(newest);
        ADD_FAILURE() << name << " changed at " << place;
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr(name));
      }
      stream.seekp(static_cast<std::streamoff>(place));
      stream.put(before).flush();
    }
    EXPECT_NO_THROW(verify_checkpoint(newest));
    fs::rename(file, file.string() + "x");
    EXPECT_THROW(verify_checkpoint(newest), IoError);
    fs::create_directory(file);
    EXPECT_THROW(verify_checkpoint(newest), IoError);
    fs::remove(file);
    fs::rename(file.string() + "x", file);
  }
}

TEST_F(Folder, TheNewestWholeOneIsFound) {
  EXPECT_FALSE(newest_whole(path()).found);
  EXPECT_FALSE(newest_whole(path() + "/nowhere").found);
  write(5), write(6), write(7);
  fs::create_directory(path() + "/step-7");                    // not a name of ours
  fs::create_directory(path() + "/.step-0000000009.new-123");  // not under its final name
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{7, 6, 5}));
  fs::resize_file(list_checkpoints(path())[0].path + "/weights.safetensors", 10);
  const Search search = newest_whole(path());
  ASSERT_TRUE(search.found);
  EXPECT_EQ(search.found->manifest.step, 6);
  ASSERT_EQ(search.corrupt.size(), 1u);
  EXPECT_THAT(search.corrupt[0].why, HasSubstr("step-0000000007/weights.safetensors"));
  prepare_checkpoints(path());
  EXPECT_FALSE(fs::exists(path() + "/.step-0000000009.new-123"));
  write(7);  // takes the corrupt one's place
  EXPECT_EQ(newest_whole(path()).found->manifest.step, 7);
}

TEST_F(Folder, OldCheckpointsAreRemovedAndCorruptOnesIgnored) {
  for (const int step : {1, 2, 3, 4, 5, 9}) write(step);
  const auto all = list_checkpoints(path());
  prune_checkpoints(path(), 5, 2, {{all[2].path, "step 4 is corrupt"}});
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{9, 5, 3}));
  prune_checkpoints(path(), 9, 0, {});
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{9, 5, 3}));
  prune_checkpoints(path(), 9, 1, {}, {{"accuracy", 0.9, 3}, {"accuracy", 0.8, 7}});
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{9, 3}));
}

TEST_F(Folder, FailedWriteCleansUp) {
  write(1);
  EXPECT_THROW(write_checkpoint(path(), 2,
                                [&](const std::string& at) -> CheckpointManifest {
                                  std::ofstream(at + "/weights.safetensors") << "half";
                                  throw IoError("no space left on device");
                                }),
               IoError);
  EXPECT_EQ(std::distance(fs::directory_iterator(path()), {}), 1);
}

TEST_F(Folder, StateComesBackBitForBit) {
  float value = 0.5f;
  for (const auto& moment : optimizer_->moments())
    for (std::int64_t i = 0; i < moment.value.count(); ++i) moment.value.f32()[i] = value += 0.25f;
  const std::string newest = write(3);
  const auto before = nn::parameters_sha256(*module_);
  nn::Generator other(99);
  nn::Context context{*backend_, other};
  const auto module = nn::make_model(context, {.name = "cnn", .sample_shape = {8, 8, 1}, .classes = 10});
  const auto optimizer = nn::make_adamw(module->named_parameters(), {});
  EXPECT_NE(nn::parameters_sha256(*module), before);
  nn::load_entries(nn::entries_of(*module), nn::read_safetensors(newest + "/weights.safetensors"), "here");
  nn::load_entries(nn::entries_of(*optimizer), nn::read_safetensors(newest + "/optimizer.safetensors"), "here");
  EXPECT_EQ(nn::parameters_sha256(*module), before);
  const auto there = optimizer_->moments(), here = optimizer->moments();
  ASSERT_EQ(here.size(), there.size());
  for (std::size_t i = 0; i < here.size(); ++i) {
    EXPECT_EQ(here[i].name, there[i].name);
    EXPECT_EQ(std::memcmp(here[i].value.raw(), there[i].value.raw(), here[i].value.bytes()), 0) << here[i].name;
  }
  const auto sgd = nn::make_sgd(module->named_parameters(), {.momentum = 0.9});
  EXPECT_THROW(nn::load_entries(nn::entries_of(*sgd), nn::read_safetensors(newest + "/optimizer.safetensors"), "here"),
               UsageError);
}

TEST_F(Folder, BucketsFollowTheOrderOfTheRunThatStopped) {
  const std::string newest = write(3);
  Resumed resumed = {.path = newest, .manifest = verify_checkpoint(newest), .corrupt = {}};
  auto& order = resumed.manifest.buckets.order;
  order.clear();
  for (const auto& [name, parameter] : module_->named_parameters()) order.push_back(name);
  std::swap(order[0], order[2]);  // neither what a run begins with nor what it comes to
  comm::SelfGroup group(std::chrono::seconds(60));
  std::optional<parallel::DistributedDataParallel> ddp(std::in_place, *module_, group);
  EXPECT_EQ(ddp->bucket_order(), std::vector<std::string>());  // it has none yet
  resume_optimizer(resumed, group, group, *optimizer_, *ddp);
  EXPECT_EQ(ddp->bucket_order(), order);
  EXPECT_EQ(ddp->parameters()[ddp->reducer().order().front()].name, order.front());
  // Where it is another model's, nothing comes of it.
  ddp.reset();
  ddp.emplace(*module_, group);
  order.back() = "another";
  resume_optimizer(resumed, group, group, *optimizer_, *ddp);
  EXPECT_EQ(ddp->bucket_order(), std::vector<std::string>());
}

TEST_F(Folder, NonFiniteStateIsNotWritten) {
  StateCopy copy(*module_, *optimizer_);
  copy.take();
  EXPECT_FALSE(copy.not_finite());
  const auto parameters = module_->named_parameters();
  parameters[2].parameter->value().f32()[3] = std::numeric_limits<float>::infinity();
  copy.take();
  EXPECT_EQ(copy.not_finite(), parameters[2].name);
  CheckpointWriter writer(copy, {.directory = path(), .keep = 1, .corrupt = {}, .metadata = {}, .part = {}});
  writer.start(some_manifest());
  writer.wait();
  EXPECT_EQ(writer.report().failed, 1);
  EXPECT_THAT(writer.report().first_failure, HasSubstr(parameters[2].name + " is not finite"));
  EXPECT_TRUE(steps().empty());
}

// Two ranks' writers of one checkpoint in parts, each with its slices.
class Parts : public Folder {
 protected:
  struct Writer {
    Writer(const Parts& test, std::size_t index)
        : part{.index = index, .count = 2, .attempt = "here-1"},
          optimizer(nn::make_adamw(test.module_->named_parameters(), {}, {}, {.slices = test.slices_of(index)})),
          copy(index == 0 ? StateCopy(*test.module_, *optimizer, nullptr, &part) : StateCopy(*optimizer, part)) {
      fill();
      copy.take();
      CheckpointWriter::Options options = {
          .directory = test.path(), .keep = 1, .corrupt = {}, .metadata = {}, .part = part};
      writer = std::make_unique<CheckpointWriter>(copy, options);
    }
    // Each element is its place among all of its moment's, and which moment that is.
    void fill() {
      const auto moments = optimizer->moments();
      for (std::size_t m = 0; m < moments.size(); ++m)
        for (std::int64_t i = 0; i < moments[m].value.count(); ++i)
          moments[m].value.f32()[i] = number(m, optimizer->slices()[m % optimizer->parameters().size()].begin + i);
    }
    checkpoint::OwnPart part;
    std::unique_ptr<nn::Optimizer> optimizer;
    StateCopy copy;
    std::unique_ptr<CheckpointWriter> writer;
  };

  static float number(std::size_t moment, std::int64_t element) {
    return static_cast<float>(moment * 100000 + static_cast<std::size_t>(element));
  }
  // The first block of each parameter, or what follows.
  std::vector<nn::ParameterSlice> slices_of(std::size_t index) const {
    std::vector<nn::ParameterSlice> slices;
    for (const auto& [name, parameter] : module_->named_parameters()) {
      const std::int64_t count = parameter->value().count(), first = std::min(count, nn::kNormBlock);
      slices.push_back(index == 0 ? nn::ParameterSlice{.begin = 0, .count = first}
                                  : nn::ParameterSlice{.begin = first == count ? 0 : first, .count = count - first});
    }
    return slices;
  }
  CheckpointManifest plan(std::int64_t step = 7) const {
    CheckpointManifest manifest = some_manifest();
    manifest.step = step;
    manifest.files.clear();
    const auto parameters = module_->named_parameters();
    for (std::size_t part = 0; part < 2; ++part) {
      auto& slices = manifest.parts.emplace_back();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (const auto [begin, count] = slices_of(part)[i]; count > 0) slices[parameters[i].name] = {begin, count};
    }
    return manifest;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(path())) all.push_back(entry.path().filename());
    return all;
  }
};

TEST_F(Parts, AppearWhenAllAreThere) {
  Writer first(*this, 0), second(*this, 1);
  first.writer->start(plan());
  ASSERT_TRUE(first.writer->wait_for_own());
  EXPECT_TRUE(steps().empty()) << "one part of two";
  second.writer->start(plan());
  first.writer->wait();  // nobody has settled it
  EXPECT_EQ(steps(), std::vector<std::int64_t>{7});
  const std::string newest = list_checkpoints(path()).front().path;
  const CheckpointManifest manifest = verify_checkpoint(newest);
  EXPECT_EQ(manifest.parts, plan().parts);
  EXPECT_EQ(manifest.files.size(), 3u);
  EXPECT_EQ(std::distance(fs::directory_iterator(newest), {}), 4) << "no receipts";
  EXPECT_EQ(first.writer->report().written, 1);
  EXPECT_EQ(first.writer->report().newest_bytes, fs::file_size(newest + "/weights.safetensors") +
                                                     fs::file_size(newest + "/optimizer-00000-of-00002.safetensors") +
                                                     fs::file_size(newest + "/optimizer-00001-of-00002.safetensors"));
}

TEST_F(Parts, AreReadByAnyNumberOfRanks) {
  Writer first(*this, 0), second(*this, 1);
  first.writer->start(plan());
  second.writer->start(plan());
  first.writer->wait();
  const std::string newest = list_checkpoints(path()).front().path;
  const CheckpointManifest manifest = verify_checkpoint(newest);
  const auto parameters = module_->named_parameters();
  const auto check = [&](const std::vector<nn::ParameterSlice>& slices) {
    const auto read = read_moments(newest, manifest, *optimizer_, slices);
    ASSERT_EQ(read.size(), 2 * parameters.size());
    for (std::size_t m = 0; m < read.size(); ++m) {
      const auto [begin, count] = slices[m % parameters.size()];
      ASSERT_EQ(read[m].size(), static_cast<std::size_t>(count) * sizeof(float));
      for (std::int64_t i = 0; i < count; ++i) {
        float value = 0;
        std::memcpy(&value, read[m].data() + static_cast<std::size_t>(i) * sizeof value, sizeof value);
        ASSERT_EQ(value, number(m, begin + i)) << m << " " << i;
      }
    }
  };
  check(whole_slices(*optimizer_));
  check(slices_of(0));
  auto across = whole_slices(*optimizer_);  // of each parameter its middle, over the border of the parts
  for (auto& slice : across) slice = {.begin = slice.count / 3, .count = slice.count / 2};
  check(across);
  // What is wanted of the first part alone does not open the second one.
  fs::remove(newest + "/optimizer-00001-of-00002.safetensors");
  check(slices_of(0));
  EXPECT_THROW(check(across), IoError);
}

TEST_F(Parts, PartsThatDoNotCoverTheMomentsAreRefused) {
  Writer first(*this, 0), second(*this, 1);
  first.writer->start(plan());
  second.writer->start(plan());
  first.writer->wait();
  const std::string newest = list_checkpoints(path()).front().path;
  const auto refusal = [&](const CheckpointManifest& manifest, const nn::Optimizer& optimizer) -> std::string {
    try {
      read_moments(newest, manifest, optimizer, whole_slices(optimizer));
    } catch (const IoError& error) {
      return error.what();
    }
    return "none";
  };
  const CheckpointManifest good = verify_checkpoint(newest);
  EXPECT_EQ(refusal(good, *optimizer_), "none");
  const std::string name = good.parts[1].begin()->first;
  CheckpointManifest bad = good;
  bad.parts[1].erase(name);
  EXPECT_THAT(refusal(bad, *optimizer_), HasSubstr("do not make up the"));
  bad = good;
  bad.parts[0][name].count += 1;  // overlaps
  EXPECT_THAT(refusal(bad, *optimizer_), HasSubstr("elements of " + name));
  bad = good;
  bad.parts[1][name].count = std::int64_t{1} << 62;
  EXPECT_THAT(refusal(bad, *optimizer_), HasSubstr("elements of " + name));
  bad = good;
  bad.parts[0]["another"] = {0, 5};
  EXPECT_THAT(refusal(bad, *optimizer_), HasSubstr("moments of another, which is not trained here"));
  bad = good;  // the manifest is right, and the files are not what it says
  std::swap(bad.parts[0], bad.parts[1]);
  EXPECT_THAT(refusal(bad, *optimizer_), HasSubstr("optimizer-00000-of-00002.safetensors cannot be used"));
  EXPECT_THAT(refusal(good, *nn::make_sgd(module_->named_parameters(), {.momentum = 0.9})), HasSubstr("tensors"));
  EXPECT_THAT(refusal(good, *nn::make_sgd(module_->named_parameters(), {})), HasSubstr("tensors"));
}

TEST_F(Parts, WithoutOneLeaveTheCheckpointBefore) {
  Writer first(*this, 0), second(*this, 1);
  first.writer->start(plan(6));
  second.writer->start(plan(6));
  first.writer->wait();
  second.writer->wait();
  // The second rank has not written, and never will.
  first.writer->start(plan(7));
  ASSERT_TRUE(first.writer->wait_for_own());
  first.writer->settle({std::nullopt, std::nullopt});
  first.writer->wait();
  EXPECT_EQ(names(), std::vector<std::string>{"step-0000000006"});
  EXPECT_EQ(first.writer->report().failed, 1);
  EXPECT_THAT(first.writer->report().first_failure, HasSubstr("no checkpoint of step 7: the part of rank 1 is not on"));
  EXPECT_EQ(first.writer->report().newest_step, 6);
  // Neither writes what is not finite, and the other one's files go with it.
  for (const auto& moment : second.optimizer->moments())
    if (moment.value.count() > 0) moment.value.f32()[0] = std::numeric_limits<float>::quiet_NaN();
  second.copy.take();
  first.writer->start(plan(8));
  second.writer->start(plan(8));
  EXPECT_FALSE(second.writer->wait_for_own());
  EXPECT_THAT(second.writer->report().first_failure, HasSubstr("is not finite after it"));
  first.writer->settle({first.writer->wait_for_own(), std::nullopt});
  first.writer->wait();
  EXPECT_EQ(names(), std::vector<std::string>{"step-0000000006"});
  second.fill();
  second.copy.take();
  first.writer->start(plan(9));
  second.writer->start(plan(9));
  first.writer->wait();
  EXPECT_EQ(names(), std::vector<std::string>{"step-0000000009"}) << "one is kept";
}

// A file that rank 0 does not see yet, as on a network file system.
TEST_F(Parts, AreTakenByTheReceiptsThatRanksSend) {
  Writer first(*this, 0);
  first.writer->start(plan());
  const auto own = first.writer->wait_for_own();
  const CheckpointManifest::File other = {.bytes = 77, .sha256 = std::string(64, 'c')};
  first.writer->settle({own, other});
  first.writer->wait();
  ASSERT_EQ(steps(), std::vector<std::int64_t>{7});
  const auto manifest = checkpoint::read_manifest(list_checkpoints(path()).front().path);
  EXPECT_EQ(manifest.files.at("optimizer-00001-of-00002.safetensors"), other);
}

// As where a rank has died.
TEST_F(Parts, AnEndDoesNotWaitForARankThatIsGone) {
  {
    Writer first(*this, 0);
    first.writer->start(plan());
  }
  EXPECT_TRUE(names().empty());
}

// Each sample is its own number.
class Numbered : public data::Dataset {
 public:
  explicit Numbered(std::uint64_t size) : Dataset({.name = "numbers", .size = size, .dims = {1}, .classes = 2}) {}
  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    x[0] = static_cast<float>(index);
    label = 0;
  }
};

// Counts what all ranks of a world are given in `steps` steps from `position` on; returns where they have come to.
sampler::SamplerState walk(const std::shared_ptr<const data::Dataset>& dataset, int world, std::uint64_t batch,
                           sampler::Tail tail, sampler::SamplerState position, int steps,
                           std::map<std::pair<std::uint64_t, int>, int>& seen) {
  sampler::SamplerState after = position;
  for (int rank = 0; rank < world; ++rank) {
    sampler::DistributedSampler sampler({.length = dataset->size(), .seed = 5, .global_batch = batch, .tail = tail},
                                        rank, world);
    sampler.restore(position);
    data::Loader loader(dataset, sampler, {.workers = 2});
    for (int step = 0; step < steps; ++step) {
      const data::Batch& given = loader.next();
      for (std::uint64_t i = 0; i < given.count; ++i) ++seen[{given.plan.epoch, static_cast<int>(given.x[i])}];
      after = given.state_after;
    }
  }
  return after;
}

TEST(Samples, NoneIsRepeatedOrSkippedAtOtherNumbersOfRanks) {
  const auto dataset = std::make_shared<const Numbered>(103);
  for (const int first : {1, 2, 4})
    for (const int second : {1, 2, 3, 5})
      for (int stop = 1; stop < 9; ++stop) {
        std::map<std::pair<std::uint64_t, int>, int> seen;
        CheckpointManifest manifest;
        manifest.position = walk(dataset, first, 30, sampler::Tail::kExact, {}, stop, seen);
        manifest = decode_checkpoint_manifest(encode(manifest), "here");
        walk(dataset, second, 30, sampler::Tail::kExact, manifest.position, 12 - stop, seen);  // three epochs of four
        ASSERT_EQ(seen.size(), 3 * dataset->size()) << first << " → " << second << " after " << stop;
        for (const auto& [sample, times] : seen) EXPECT_EQ(times, 1);
      }
}

}  // namespace
}  // namespace lockstep::trainer
