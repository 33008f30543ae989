#include "trainer/event_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "lockstep/base/env.h"

namespace lockstep::trainer {
namespace {

namespace fs = std::filesystem;

constexpr auto kPause = std::chrono::seconds(1);  // between two writes
constexpr std::size_t kMostWaiting = std::size_t{64} << 20;
constexpr const char* kPrefix = "events.out.tfevents.";

/// Numbers of fields, by message, and of values.
namespace field {
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;  // Event
constexpr int kStatus = 1;                                                                // SessionLog
constexpr int kValue = 1;                                                                 // Summary
constexpr int kTag = 1, kSimpleValue = 2, kHisto = 5, kTensor = 8, kMetadata = 9;         // Summary.Value
constexpr int kPluginData = 1, kPluginName = 1;                                           // SummaryMetadata, PluginData
constexpr int kDtype = 1, kShape = 2, kStringVal = 8;                                     // TensorProto
constexpr int kMin = 1, kMax = 2, kNum = 3, kSum = 4, kSumSquares = 5, kBucketLimit = 6, kBucket = 7;  // HistogramProto
}  // namespace field
constexpr std::uint64_t kStart = 1;     // SessionLog.SessionStatus
constexpr std::uint64_t kDtString = 7;  // DataType

enum Wire : unsigned { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class Bits>
void put_fixed(std::string& to, Bits bits) {
  std::array<char, sizeof bits> bytes;
  for (std::size_t i = 0; i < sizeof bits; ++i) bytes[i] = static_cast<char>(bits >> (8 * i) & 0xff);
  to.append(bytes.data(), bytes.size());
}

void put_varint(std::string& to, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>((value & 0x7f) | 0x80);
  to += static_cast<char>(value);
}

void put_key(std::string& to, int field, Wire wire) { put_varint(to, static_cast<unsigned>(field) << 3 | wire); }

void put(std::string& to, int field, double value) {
  put_key(to, field, kFixed64);
  put_fixed(to, std::bit_cast<std::uint64_t>(value));
}

void put(std::string& to, int field, float value) {
  put_key(to, field, kFixed32);
  put_fixed(to, std::bit_cast<std::uint32_t>(value));
}

void put(std::string& to, int field, std::uint64_t value) {
  put_key(to, field, kVarint);
  put_varint(to, value);
}

void put(std::string& to, int field, std::string_view bytes) {
  put_key(to, field, kBytes);
  put_varint(to, bytes.size());
  to += bytes;
}

void put(std::string& to, int field, std::span<const double> values) {
  put_key(to, field, kBytes);
  put_varint(to, values.size() * sizeof(double));
  for (const double value : values) put_fixed(to, std::bit_cast<std::uint64_t>(value));
}

std::uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(std::as_bytes(std::span(bytes))), 15) + 0xa282ead8u;
}

constexpr std::size_t kFrame = 16;  // of a record: the event's length, and two CRCs

/// How many bytes of the beginning of some records are whole ones.
std::size_t whole_records(std::string_view bytes) {
  std::size_t whole = 0;
  while (bytes.size() - whole >= kFrame) {
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < sizeof length; ++i)
      length |= std::uint64_t{static_cast<unsigned char>(bytes[whole + i])} << (8 * i);
    if (bytes.size() - whole - kFrame < length) break;
    whole += kFrame + length;
  }
  return whole;
}

/// Later than those of all files that are there: a reader takes them in the order of their names.
std::int64_t seconds_for_name(const fs::path& directory) {
  std::int64_t seconds = std::time(nullptr);
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(directory, none)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const std::size_t begin = std::string_view(kPrefix).size();
    if (const auto there = parse_int(name.substr(begin, name.find('.', begin) - begin));
        there && *there < 9'999'999'999)
      seconds = std::max(seconds, *there + 1);
  }
  return seconds;
}

std::string file_name(const fs::path& directory) {
  std::string host = host_name();
  for (char& c : host)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '.') c = '_';
  return fmt::format("{}{:010}.{}.{}.0", kPrefix, seconds_for_name(directory), host, ::getpid());
}

}  // namespace

void Event::begin(double wall_time, std::int64_t step) {
  event_.clear();
  summary_.clear();
  put(event_, field::kWallTime, wall_time);
  if (step != 0) put(event_, field::kStep, static_cast<std::uint64_t>(step));
}

void Event::set_file_version() { put(event_, field::kFileVersion, std::string_view("brain.Event:2")); }

void Event::set_session_start() {
  value_.clear();
  put(value_, field::kStatus, kStart);
  put(event_, field::kSessionLog, value_);
}

void Event::add_scalar(std::string_view tag, double value) {
  value_.clear();
  put(value_, field::kTag, tag);
  put(value_, field::kSimpleValue, static_cast<float>(value));
  put(summary_, field::kValue, value_);
}

void Event::add_text(std::string_view tag, std::string_view text) {
  value_.clear();
  put(value_, field::kTag, tag);
  inner_.clear();
  put(inner_, field::kDtype, kDtString);
  put(inner_, field::kShape, std::string_view());
  put(inner_, field::kStringVal, text);
  put(value_, field::kTensor, inner_);
  std::string plugin, metadata;
  put(plugin, field::kPluginName, std::string_view("text"));
  put(metadata, field::kPluginData, plugin);
  put(value_, field::kMetadata, metadata);
  put(summary_, field::kValue, value_);
}

void Event::add_histogram(std::string_view tag, const Histogram& histogram) {
  value_.clear();
  put(value_, field::kTag, tag);
  inner_.clear();
  put(inner_, field::kMin, histogram.min);
  put(inner_, field::kMax, histogram.max);
  put(inner_, field::kNum, static_cast<double>(histogram.count));
  put(inner_, field::kSum, histogram.sum);
  put(inner_, field::kSumSquares, histogram.squares);
  put(inner_, field::kBucketLimit, histogram.limits);
  put(inner_, field::kBucket, histogram.counts);
  put(value_, field::kHisto, inner_);
  put(summary_, field::kValue, value_);
}

void Event::append_to(std::string& records) {
  if (!summary_.empty()) put(event_, field::kSummary, summary_);
  const std::size_t at = records.size();
  put_fixed(records, static_cast<std::uint64_t>(event_.size()));
  put_fixed(records, masked_crc(std::string_view(records).substr(at)));
  records += event_;
  put_fixed(records, masked_crc(event_));
}

EventFile::EventFile(const std::string& directory) {
  constexpr const char* kRemedy = "choose another --tensorboard directory";
  std::error_code why;
  fs::create_directories(directory, why);
  if (!fs::is_directory(directory))
    throw IoError(
        fmt::format("cannot make directory {} for TensorBoard: {}", directory, why ? why.message() : "it is a file"),
        kRemedy);
  path_ = (fs::path(directory) / file_name(directory)).string();
  fd_ = UniqueFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd_) throw IoError(fmt::format("cannot write {} for TensorBoard: {}", path_, errno_text(errno)), kRemedy);
  writer_ = start_thread([this] { write_as_they_come(); });
}

EventFile::~EventFile() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wakes_.notify_one();
  writer_.join();
}

void EventFile::add(std::string_view records) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    if (waiting_.size() + records.size() <= kMostWaiting) {
      waiting_ += records;
      return;
    }
  }
  fail("the disk is too slow for it");
}

void EventFile::hurry() {
  {
    const std::lock_guard lock(mutex_);
    hurries_ = true;
  }
  wakes_.notify_one();
}

std::string EventFile::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void EventFile::write_as_they_come() {
  std::string records;
  for (bool ends = false; !ends;) {
    {
      std::unique_lock lock(mutex_);
      wakes_.wait_for(lock, kPause, [this] { return hurries_ || ends_; });
      hurries_ = false;
      ends = ends_;
      records.clear();
      records.swap(waiting_);
      if (!failure_.empty()) continue;
    }
    if (!records.empty()) write(records);
  }
}

void EventFile::write(std::string_view records) {
  const ssize_t written = ::write(fd_.get(), records.data(), records.size());
  if (written == static_cast<ssize_t>(records.size())) {
    size_ += written;
    return;
  }
  const std::string why = written < 0 ? errno_text(errno) : "no space left on device";
  // Readers stay at half a record for ever. What cannot be cut off they see all the same.
  const auto whole = static_cast<std::int64_t>(
      whole_records(records.substr(0, static_cast<std::size_t>(std::max<ssize_t>(written, 0)))));
  [[maybe_unused]] const int cut = ::ftruncate(fd_.get(), size_ + whole);
  fail(why);
}

void EventFile::fail(const std::string& why) {
  const std::string text = fmt::format("TensorBoard's file {} is cut: {}", path_, why);
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = text;
    waiting_.clear();
  }
  log_warn("{}; training continues without it", text);
}

}  // namespace lockstep::trainer
