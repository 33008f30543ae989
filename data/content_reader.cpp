#include "data/content_reader.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/file.h"

namespace lockstep::data {
namespace {

// zlib puts the name that it knows, "<fd:n>: ", before its messages.
std::string strip_path(const std::string& text) {
  const auto colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

}  // namespace

ContentReader::ContentReader(const std::string& path) : path_(path) {
  RegularFile file = open_regular(path);
  if (!file.problem.empty())
    throw IoError(fmt::format("{}: {}", path, file.problem), file.remedy_or("check the path and its permissions"));
  file_bytes_ = file.size;
  if (file_bytes_ == 0) throw IoError(fmt::format("{}: the file is empty (ends at byte 0)", path), kFetchAgain);
  file_ = ::gzdopen(file.fd.get(), "rb");
  if (file_ == nullptr) throw IoError(fmt::format("{}: no memory to read it", path));
  static_cast<void>(file.fd.release());  // gzclose closes it
  ::gzbuffer(file_, 1u << 17);
}

ContentReader::~ContentReader() { ::gzclose(file_); }

bool ContentReader::compressed() const { return ::gzdirect(file_) == 0; }

std::uint64_t ContentReader::read(std::uint8_t* out, std::uint64_t count) {
  std::uint64_t done = 0;
  while (done < count) {
    const auto piece = static_cast<unsigned>(std::min<std::uint64_t>(count - done, 1u << 24));
    const int got = ::gzread(file_, out + done, piece);
    if (got > 0) done += static_cast<unsigned>(got);
    int error = Z_OK;
    const char* text = ::gzerror(file_, &error);
    if (error == Z_ERRNO) throw IoError(fmt::format("{}: {}", path_, errno_text(errno)));
    if (error != Z_OK) {
      throw IoError(fmt::format("{}: {} at byte {} of the compressed file, after {} bytes of content", path_,
                                error == Z_BUF_ERROR ? "the compressed data are cut off" : strip_path(text),
                                ::gzoffset(file_), ::gztell(file_)),
                    kFetchAgain);
    }
    if (got <= 0) break;
  }
  return done;
}

std::string ContentReader::read_all() {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  std::string all;
  while (true) {
    const std::size_t before = all.size();
    all.resize(before + kPiece);
    const auto got = read(reinterpret_cast<std::uint8_t*>(all.data()) + before, kPiece);
    all.resize(before + got);
    if (got < kPiece) return all;
  }
}

}  // namespace lockstep::data
