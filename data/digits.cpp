#include "data/built_in.h"

#include <algorithm>

#include "base/error.h"
#include "data/images.h"
#include "lockstep/data/families.h"

extern "C" {
extern const unsigned char lockstep_digits[];
extern const unsigned char lockstep_digits_end[];
}

namespace lockstep::data {

namespace {

// Pixels in [0, 1].
constexpr Normalisation kDigits = {{0, 0, 0}, {1, 1, 1}};
constexpr std::size_t kPixels = 64;
constexpr std::size_t kDigitBytes = kPixels + 1;
constexpr std::uint64_t kTestEvery = 5;

std::uint64_t record_count() { return digits_file().size() / kDigitBytes; }

class Digits : public Dataset {
 public:
  enum class Part { kTrain, kTest };

  Digits(Part part, int classes, const Mixing& mixing) : Dataset(info_of(part, classes, mixing)), part_(part) {}

  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    LOCKSTEP_ASSERT(index < size() && x.size() == kPixels, "sample {} into {} numbers", index, x.size());
    // The training records are the runs of four between the test records.
    const std::uint64_t record = part_ == Part::kTest ? index * kTestEvery : index + index / (kTestEvery - 1) + 1;
    const auto bytes = digits_file().subspan(record * kDigitBytes, kDigitBytes);
    std::transform(bytes.begin(), bytes.end() - 1, x.begin(),
                   [](std::uint8_t v) { return static_cast<float>(v) / 16; });
    label = bytes[kPixels];
  }

 private:
  static Info info_of(Part part, int classes, const Mixing& mixing) {
    const std::uint64_t test = (record_count() + kTestEvery - 1) / kTestEvery;
    const bool is_test = part == Part::kTest;
    return {.name = is_test ? "digits test" : "digits train",
            .size = is_test ? test : record_count() - test,
            .dims = {8, 8, 1},
            .classes = classes,
            .image = std::make_shared<const ImageForm>(
                ImageForm{.height = 8, .width = 8, .channels = 1, .normalisation = kDigits, .cropped = false}),
            .mixing = mixing};
  }

  Part part_;
};

}  // namespace

std::span<const std::uint8_t> digits_file() { return {lockstep_digits, lockstep_digits_end}; }

DataSplits open_digits(int classes, const Mixing& mixing) {
  return {std::make_shared<Digits>(Digits::Part::kTrain, classes, mixing),
          std::make_shared<Digits>(Digits::Part::kTest, classes, Mixing())};
}

const DatasetFamily& digits_family() {
  static const DatasetFamily family = {.name = "digits",
                                       .about = "shipped",
                                       .settings = mixing_settings(),
                                       .classes = kDigitsClasses,
                                       .test_validates = true,
                                       .open = [](const std::string&, const std::string&, const OpenOptions& options) {
                                         return open_digits(options.classes, mixing_of(options.settings));
                                       }};
  return family;
}

}  // namespace lockstep::data
