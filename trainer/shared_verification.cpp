#include "trainer/resume.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "base/error.h"

namespace lockstep::trainer {
namespace {

using checkpoint::CheckpointManifest;

/// Collective: what is wrong with the files of the checkpoint at `path`, the first of it; empty: nothing.
std::string find_corruption(comm::ProcessGroup& group, const std::string& path, const CheckpointManifest& manifest) {
  bool sees = group.rank() == 0;
  try {
    sees = sees || checkpoint::read_manifest(path) == manifest;
  } catch (const IoError&) {
    // It is on another host's disk.
  }
  const auto all = group.all_gather_numbers(sees ? 1 : 0);
  const auto before = std::ranges::count(std::span(all).first(static_cast<std::size_t>(group.rank())), 1);
  std::string why;
  if (sees) {
    try {
      const auto files = checkpoint::files_of(path, manifest);
      const auto sharing = static_cast<std::size_t>(std::ranges::count(all, 1));
      for (const auto& file : share_of(files, manifest, static_cast<std::size_t>(before), sharing))
        checkpoint::verify_file(path, manifest, file);
    } catch (const IoError& error) {
      why = error.what();
    }
  }
  const auto texts = group.all_gather_text(why);
  const auto first = std::ranges::find_if(texts, [](const std::string& text) { return !text.empty(); });
  return first != texts.end() ? *first : std::string();
}

}  // namespace

std::vector<std::string> share_of(const std::vector<std::string>& files, const CheckpointManifest& manifest,
                                  std::size_t index, std::size_t count) {
  const std::size_t parts = manifest.parts.size();
  std::vector<std::string> mine;
  for (std::size_t part = parts * index / count; part < parts * (index + 1) / count; ++part)
    mine.push_back(checkpoint::part_file(part, parts));
  if (index > 0) return mine;
  std::ranges::copy_if(files, std::back_inserter(mine), [&](const std::string& file) {
    for (std::size_t part = 0; part < parts; ++part)
      if (file == checkpoint::part_file(part, parts)) return false;
    return true;
  });
  return mine;
}

void verify_together(comm::ProcessGroup& group, FunctionRef<void(checkpoint::Verify verify)> look) {
  if (group.size() == 1) return look([](const std::string& path) { return checkpoint::verify_checkpoint(path); });
  if (group.rank() != 0) {
    for (;;) {
      const std::string path = group.all_gather_text({}).front();
      if (path.empty()) return;
      const std::string manifest = group.all_gather_text({}).front();
      find_corruption(group, path, checkpoint::decode_checkpoint_manifest(manifest, "rank 0's manifest"));
    }
  }
  bool asking = false;  // an error then is the group's, on which nothing follows
  const auto verify = [&](const std::string& path) {
    CheckpointManifest manifest = checkpoint::read_manifest(path);
    const auto files = checkpoint::files_of(path, manifest);
    if (manifest.parts.empty()) {
      for (const auto& file : files) checkpoint::verify_file(path, manifest, file);
      return manifest;
    }
    asking = true;
    group.all_gather_text(path);
    group.all_gather_text(encode(manifest));
    const std::string why = find_corruption(group, path, manifest);
    asking = false;
    if (!why.empty()) throw IoError(why, "use another checkpoint");
    return manifest;
  };
  try {
    look(verify);
  } catch (...) {
    if (!asking) group.all_gather_text({});
    throw;
  }
  group.all_gather_text({});
}

}  // namespace lockstep::trainer
