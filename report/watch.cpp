// lockstep watch: a run's curves in a terminal, as it trains.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/signals.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"
#include "options/sources.h"
#include "options/values.h"
#include "report/report.h"

namespace lockstep::report {
namespace {

/// Points of a curve in braille letters, two by four to each.
class Canvas {
 public:
  Canvas(int columns, int lines)
      : columns_(columns), lines_(lines), letters_(static_cast<std::size_t>(columns * lines), 0) {}
  int width() const { return 2 * columns_; }
  int height() const { return 4 * lines_; }
  /// From the left and from the top.
  void set(int x, int y) {
    constexpr int kBits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    letters_[place(y / 4, x / 2)] |= kBits[y % 4][x % 2];
  }
  std::string line(int number) const {
    std::string text;
    for (int column = 0; column < columns_; ++column) {
      const int bits = letters_[place(number, column)];
      if (bits == 0) {
        text += ' ';
        continue;
      }
      // U+2800 and the bits, in UTF-8.
      text += '\xe2';
      text += static_cast<char>(0xa0 + (bits >> 6));
      text += static_cast<char>(0x80 + (bits & 0x3f));
    }
    return text.substr(0, text.find_last_not_of(' ') + 1);
  }

 private:
  std::size_t place(int line, int column) const {
    return static_cast<std::size_t>(line) * static_cast<std::size_t>(columns_) + static_cast<std::size_t>(column);
  }

  int columns_, lines_;
  std::vector<int> letters_;
};

struct Panel {
  std::string title;
  std::vector<double> x, y;
};

std::vector<Panel> panels_of(const Run& run) {
  std::vector<Panel> panels;
  panels.push_back({"training loss", run.of(Field::kStep), run.of(Field::kLoss)});
  if (!run.evaluations.empty()) {
    const Evaluation& last = run.evaluations.back();
    for (const auto& [name, value] : last.figures) {
      Curve curve = curve_of(run, name, last.split, last.of_average);
      panels.push_back({split_text(last.split) + " " + name, std::move(curve.x), std::move(curve.y)});
    }
  }
  panels.push_back({"samples/s", run.of(Field::kStep), run.of(Field::kSamplesPerS)});
  panels.push_back({"learning rate", run.of(Field::kStep), run.of(Field::kLr)});
  std::erase_if(panels, [](const Panel& panel) { return extent_of(panel.x, panel.y).points == 0; });
  return panels;
}

/// `steps`: those of the run, so that all panels have one axis.
std::vector<std::string> panel_drawing(const Panel& panel, const Extent& steps, int columns, int lines) {
  const Extent extent = extent_of(panel.x, panel.y);
  std::vector<std::string> text = {fmt::format("{}  last {}  least {}  greatest {}", panel.title, shown(extent.last),
                                               shown(extent.least), shown(extent.most))};
  const std::string top = shown(extent.most), bottom = shown(extent.least);
  const int margin = std::max(columns_of(top), columns_of(bottom)) + 1;
  if (columns - margin < 8) return text;
  Canvas canvas(columns - margin, lines);
  const double spread = extent.most > extent.least ? extent.most - extent.least : 1;
  const auto row_of = [&](double value) {
    const auto row = static_cast<int>(std::lround((extent.most - value) / spread * (canvas.height() - 1)));
    return std::clamp(row, 0, canvas.height() - 1);
  };
  // Neighbours are joined, so that a few evaluations are a curve too.
  const auto bins = binned(panel.x, panel.y, static_cast<std::size_t>(canvas.width()));
  const auto column_of = [&](double step) {
    const double share = steps.most > steps.least ? (step - steps.least) / (steps.most - steps.least) : 0;
    return std::clamp(static_cast<int>(std::lround(share * (canvas.width() - 1))), 0, canvas.width() - 1);
  };
  for (std::size_t i = 0; i < bins.size(); ++i) {
    const int x = column_of(bins[i].x);
    for (int row = row_of(bins[i].most); row <= row_of(bins[i].least); ++row) canvas.set(x, row);
    if (i == 0) continue;
    const int from = column_of(bins[i - 1].x);
    for (int between = from + 1; between < x; ++between) {
      const double share = static_cast<double>(between - from) / (x - from);
      canvas.set(between, row_of(bins[i - 1].mean + share * (bins[i].mean - bins[i - 1].mean)));
    }
  }
  for (int line = 0; line < lines; ++line) {
    const std::string label = line == 0 ? top : line == lines - 1 ? bottom : "";
    text.push_back(std::string(static_cast<std::size_t>(margin - 1 - columns_of(label)), ' ') + label + " " +
                   canvas.line(line));
  }
  return text;
}

std::string state_of(const Run& run) {
  std::vector<std::string> words;
  if (!run.starts.empty())
    words.push_back(fmt::format("{} on {}, ranks: {}", run.starts.back().model, run.starts.back().data,
                                run.starts.back().ranks.size()));
  if (run.size() > 0)
    words.push_back(fmt::format("epoch {:.0f}, step {:.0f}{}", run.of(Field::kEpoch).back(),
                                run.of(Field::kStep).back(),
                                run.starts.empty() ? "" : fmt::format(" of {:.0f}", run.starts.back().planned_steps)));
  if (run.final) words.push_back(fmt::format("done in {}", duration_text(run.final->wall_s)));
  return join(words, "; ");
}

/// The metrics file as far as it has been read. One that became shorter belongs to a run that has resumed, or to
/// another one: it is read anew.
class Followed {
 public:
  explicit Followed(std::string path) : path_(std::move(path)), reader_(path_) {}
  const Run& read() {
    RegularFile file = open_regular(path_);
    if (!file.problem.empty()) throw IoError(fmt::format("{}: {}", path_, file.problem), file.remedy_or(kRemedy));
    struct stat there = {};
    const bool other = ::fstat(file.fd.get(), &there) == 0 && std::exchange(inode_, there.st_ino) != there.st_ino;
    if (file.size < done_ || other) {
      reader_ = RunReader(path_);
      done_ = 0;
    }
    std::string piece(std::size_t{1} << 20, '\0');
    for (;;) {
      const ssize_t count = ::pread(file.fd.get(), piece.data(), piece.size(), static_cast<off_t>(done_));
      if (count < 0) throw IoError(fmt::format("{}: {}", path_, errno_text(errno)), kRemedy);
      if (count == 0) return reader_.run();
      reader_.add(std::string_view(piece).substr(0, static_cast<std::size_t>(count)));
      done_ += static_cast<std::uint64_t>(count);
    }
  }

 private:
  static constexpr const char* kRemedy = "give the file that --metrics FILE.jsonl writes";
  std::string path_;
  RunReader reader_;
  std::uint64_t done_ = 0;
  ino_t inode_ = 0;
};

}  // namespace

std::vector<std::string> drawing_of(const Run& run, int columns, int lines) {
  std::vector<std::string> all = {state_of(run)};
  const auto panels = panels_of(run);
  constexpr int kLeast = 4, kMost = 12;  // lines of a panel with its title
  const int left = std::max(0, lines - 1);
  const Extent steps = extent_of(run.of(Field::kStep), run.of(Field::kStep));
  const auto fits = std::min(static_cast<int>(panels.size()), left / kLeast);
  for (int i = 0; i < fits; ++i) {
    const int height = std::clamp(left / fits, kLeast, kMost);
    for (auto& line : panel_drawing(panels[static_cast<std::size_t>(i)], steps, columns, height - 1))
      all.push_back(std::move(line));
  }
  if (fits == 0 && run.size() > 0) all.push_back(fmt::format("loss {}", shown(run.of(Field::kLoss).back())));
  for (auto& line : all) line = cut_columns(line, columns);
  return all;
}

options::OptionTable watch_options(WatchOptions& options) {
  options::OptionTable table("watch", "Draws a run's curves in the terminal while it trains, from its metrics file.");
  table.positional({"RUN", "a metrics file, or a directory with one", options::text(options.run)});
  table.group("Flags");
  table.add({.name = "every",
             .placeholder = "SECONDS",
             .help = "seconds between drawings",
             .default_text = "1",
             .value = options::number(options.every, {.low = 0.1, .high = 3600})});
  table.add({.name = "once",
             .kind = options::OptionKind::kFlag,
             .help = "draw once and end, as it does where stdout is no terminal",
             .value = options::boolean(options.once)});
  options::add_config_option(table);
  return table;
}

int watch(const WatchOptions& options) {
  const std::string path = metrics_file_of(options.run);
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  Followed followed(path);
  watch_for_stops();
  for (;;) {
    const Run& run = followed.read();
    struct winsize size = {};
    const bool sized = terminal && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 1;
    const int columns = sized ? size.ws_col : 80, lines = sized ? size.ws_row - 1 : 40;
    const bool once = options.once || !terminal;
    std::string text = once ? "" : "\033[H\033[J";
    for (const auto& line : drawing_of(run, columns, lines)) text += line + "\n";
    if (std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0) return 0;  // nobody looks any more
    if (once || run.final) return 0;
    const auto until = Clock::now() + duration_of(options.every);
    while (Clock::now() < until) {
      if (stop_request() != 0) return 128 + stop_request();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

}  // namespace lockstep::report
