// Files of events as TensorBoard reads them.
//
// Note [Event files]
// A file is records: the length of the event in 8 bytes, the masked CRC-32C of these, the event, its masked CRC-32C;
// all in little-endian order (TensorFlow, core/lib/io/record_writer.h). An event is a protobuf message
// (core/util/event.proto, core/framework/summary.proto, histogram.proto, tensor.proto in there), of which few fields
// are needed, so it is written by hand. A reader follows a directory's files in the order of their names, and waits at
// the end of the last one. A session's start has it forget what it has of this step and later ones.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "base/scope.h"
#include "trainer/histogram.h"

namespace lockstep::trainer {

/// An event that is being written. Its memory is used again for the next one.
class Event {
 public:
  /// Begins one; `wall_time` in seconds since 1970.
  void begin(double wall_time, std::int64_t step);
  /// "brain.Event:2", of which a file's first event is.
  void set_file_version();
  /// Readers drop what they have of this step and later ones.
  void set_session_start();
  void add_scalar(std::string_view tag, double value);
  /// In Markdown.
  void add_text(std::string_view tag, std::string_view text);
  void add_histogram(std::string_view tag, const Histogram& histogram);
  /// As a record, at the end of `records`.
  void append_to(std::string& records);

 private:
  std::string event_, summary_, value_, inner_;
};

/// A new file of a directory, and the thread that writes it: at the latest a second after add(). Where it cannot be
/// written it warns once and ends with the last whole record; failure() then says what happened. Thread-safe.
class EventFile {
 public:
  /// Makes the directory, with those above it, where it is missing. The file's name comes after those of all files of
  /// events there. Throws IoError naming what cannot be made.
  explicit EventFile(const std::string& directory);
  /// Writes what is left.
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  const std::string& path() const { return path_; }
  /// Whole records. Never waits for the disk.
  void add(std::string_view records);
  /// Those that have been added are written at once.
  void hurry();
  std::string failure() const;

 private:
  void write_as_they_come();
  void write(std::string_view records);
  void fail(const std::string& why);

  std::string path_;
  UniqueFd fd_;
  std::int64_t size_ = 0;  // of the file: the writer's
  mutable std::mutex mutex_;
  std::condition_variable wakes_;
  std::string waiting_;  // records on their way to the file
  bool hurries_ = false, ends_ = false;
  std::string failure_;
  std::thread writer_;
};

}  // namespace lockstep::trainer
