#include "data/open.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/text.h"
#include "data/cifar10.h"
#include "data/digits.h"
#include "data/images.h"
#include "data/mnist.h"
#include "data/random.h"
#include "data/text.h"
#include "data/tokens.h"

namespace lockstep::data {

namespace {

constexpr const char* kKnown =
    "known data: digits, mnist:DIR, cifar10:DIR, images:DIR, random:SHAPE,LEN, text:FILE, tokens:FILE";
constexpr const char* kRandomHelp =
    "write random:SHAPE,LEN with SHAPE a number of features, CxHxW or 'tokens', such as random:3x32x32,1000";
// 4 GiB of f32: far above any sample, far below overflow.
constexpr std::int64_t kMostElements = std::int64_t{1} << 30;

// "5" → {5}; "3x32x40" (C, H, W, as people write it) → {32, 40, 3} (H, W, C, as memory holds it).
std::vector<std::int64_t> parse_shape(const std::string& spec, const std::string& text) {
  std::vector<std::int64_t> dims;
  std::int64_t elements = 1;
  for (const auto& piece : split(text, 'x')) {
    const auto dim = parse_int(piece);
    if (!dim || *dim < 1) throw UsageError(fmt::format("data '{}': '{}' is not a shape", spec, text), kRandomHelp);
    if (*dim > kMostElements / elements) {
      throw UsageError(fmt::format("data '{}': a sample of more than 2^30 numbers", spec), "give a smaller shape");
    }
    elements *= *dim;
    dims.push_back(*dim);
  }
  if (dims.size() == 3) return {dims[1], dims[2], dims[0]};
  if (dims.size() == 1) return dims;
  throw UsageError(fmt::format("data '{}': '{}' has {} dimensions, not 1 or 3", spec, text, dims.size()), kRandomHelp);
}

DataSplits open_random(const std::string& spec, const std::string& argument, const OpenOptions& options) {
  const auto pieces = split(argument, ',');
  if (pieces.size() != 2) throw UsageError(fmt::format("data '{}' needs a shape and a length", spec), kRandomHelp);
  const bool tokens = pieces[0] == "tokens";
  const auto dims = tokens ? std::vector<std::int64_t>() : parse_shape(spec, pieces[0]);
  const auto length = parse_int(pieces[1]);
  if (!length || *length < 0) {
    throw UsageError(fmt::format("data '{}': '{}' is not a number of samples", spec, pieces[1]), kRandomHelp);
  }
  if (*length == 0) {
    throw IoError(fmt::format("data '{}': empty data set", spec), "give data with at least one sample");
  }
  if (tokens)
    return make_random_tokens(options.context, static_cast<std::uint64_t>(*length),
                              options.classes > 0 ? options.classes : kRandomTokens, options.seed);
  return make_random(dims, static_cast<std::uint64_t>(*length), options.classes > 0 ? options.classes : kRandomClasses,
                     options.seed);
}

void refuse_option(bool given, const char* flag, const std::string& name, const char* takers) {
  if (given)
    throw UsageError(fmt::format("--{} for the data set {}", flag, name),
                     fmt::format("leave it out: it is for {}", takers));
}

const std::string& directory_of(const std::string& spec, const std::string& argument, const char* what) {
  if (argument.empty()) throw UsageError(fmt::format("data '{}' needs a directory", spec), what);
  return argument;
}

// What `name` does not take must not have been asked for.
void check_image_options(const std::string& name, const OpenOptions& options) {
  const bool images = name == "images";
  refuse_option(options.augment && !images && name != "cifar10", "augment", name, "cifar10 and images");
  refuse_option(options.image_size && !images, "image-size", name, "images");
  refuse_option(options.most_damaged && !images, "most-damaged", name, "images");
  if (options.image_size && (*options.image_size < 1 || *options.image_size > kMostImageSize))
    throw UsageError(fmt::format("images of {} pixels", *options.image_size),
                     fmt::format("give --image-size 1 to {}", kMostImageSize));
}

DataSplits open_cifar10_as(const std::string& directory, const OpenOptions& options) {
  if (options.classes > 0 && options.classes < kCifar10Classes)
    throw UsageError(fmt::format("cifar10 has {} classes, {} were asked for", kCifar10Classes, options.classes),
                     fmt::format("leave --classes out, or give {} or more", kCifar10Classes));
  return open_cifar10(directory, options.classes > 0 ? options.classes : kCifar10Classes,
                      options.augment.value_or(true));
}

}  // namespace

DataSplits open_data(const std::string& spec, const OpenOptions& options) {
  if (options.classes < 0) throw UsageError(fmt::format("{} classes", options.classes), "give --classes 1 or more");
  const auto colon = spec.find(':');
  const std::string name = spec.substr(0, colon);
  const std::string argument = colon == std::string::npos ? "" : spec.substr(colon + 1);
  const std::array<std::string, 7> names = {"digits", "mnist", "cifar10", "images", "random", "text", "tokens"};
  if (std::ranges::find(names, name) != names.end()) check_image_options(name, options);

  if (name == "digits") {
    if (colon != std::string::npos)
      throw UsageError(fmt::format("data '{}': digits takes no argument", spec), "write digits");
    const int classes = options.classes > 0 ? options.classes : kDigitsClasses;
    if (classes < kDigitsClasses) {
      throw UsageError(fmt::format("digits has {} classes, {} were asked for", kDigitsClasses, classes),
                       fmt::format("leave --classes out, or give {} or more", kDigitsClasses));
    }
    return open_digits(classes);
  }
  if (name == "mnist")
    return open_mnist(directory_of(spec, argument, "write mnist:DIR, the directory with MNIST's IDX files"),
                      options.classes > 0 ? options.classes : kMnistClasses);
  if (name == "cifar10")
    return open_cifar10_as(
        directory_of(spec, argument, "write cifar10:DIR, the directory with the files of its binary version"), options);
  if (name == "images")
    return open_images(directory_of(spec, argument, "write images:DIR, a directory with a folder for each class"),
                       {.classes = options.classes,
                        .size = options.image_size.value_or(kDefaultImageSize),
                        .augment = options.augment.value_or(true),
                        .most_damaged = options.most_damaged.value_or(kDefaultMostDamaged)});
  if (name == "random") return open_random(spec, argument, options);

  if (name == "text" || name == "tokens") {
    if (argument.empty())
      throw UsageError(fmt::format("data '{}' needs a file", spec), fmt::format("write {}:FILE", name));
    if (name == "tokens")
      return open_tokens(argument, options.context, options.classes > 0 ? options.classes : kGpt2Tokens);
    if (options.classes > 0)
      throw UsageError(
          fmt::format("--classes {} for {}: a text has as many tokens as it has characters", options.classes, spec),
          "leave --classes out");
    return open_text(argument, options.context, options.characters);
  }

  const auto meant = nearest(name, names);
  throw UsageError(fmt::format("unknown data '{}'", spec),
                   meant ? fmt::format("did you mean '{}'? {}", *meant, kKnown) : std::string(kKnown));
}

}  // namespace lockstep::data
