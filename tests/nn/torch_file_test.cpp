// Files of torch.save(): those that PyTorch wrote (tests/nn/golden/make_torch_files.py), and hand-made ones that lie.
#include "nn/io/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"
#include "lockstep/nn/io/weights.h"
#include "nn/io/unpickler.h"
#include "tests/nn/pickles.h"
#include "tests/support/json.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using lockstep::testing::read_file;
using lockstep::testing::TemporaryDirectory;
using lockstep::testing::write_file;
using ::testing::HasSubstr;
using namespace std::string_literals;

using testing::dictionary;
using testing::legacy;
using testing::Pickle;

const std::string kGolden = std::string(LOCKSTEP_SOURCE_DIR) + "/tests/nn/golden/";

std::vector<double> values_of(const HostTensor& tensor) {
  std::vector<double> values;
  const auto add = [&]<class T>(T) {
    for (std::size_t at = 0; at < tensor.bytes.size(); at += sizeof(T)) {
      T value;
      std::memcpy(&value, tensor.bytes.data() + at, sizeof value);
      values.push_back(static_cast<double>(value));
    }
  };
  switch (tensor.dtype) {
    case DType::kF32: add(float{}); break;
    case DType::kF64: add(double{}); break;
    case DType::kI32: add(std::int32_t{}); break;
    case DType::kI64: add(std::int64_t{}); break;
    case DType::kU8: add(std::uint8_t{}); break;
    default: ADD_FAILURE() << "a type that no file should give";
  }
  return values;
}

std::string type_of(DType dtype) {
  switch (dtype) {
    case DType::kF64: return "float64";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
    case DType::kU8: return "uint8";
    default: return "float32";
  }
}

std::string refusal(const std::string& path) {
  try {
    read_torch_file(path);
  } catch (const IoError& error) {
    EXPECT_FALSE(error.remedy().empty());
    EXPECT_EQ(error.line().find('\n'), std::string::npos);
    return error.what();
  }
  return "nothing was thrown";
}

TEST(TorchFile, ReadsWhatPyTorchWrote) {
  const auto facts = lockstep::testing::json_in(read_file(kGolden + "torch_files.json"))["files"];
  int files = 0;
  for (const auto& [name, expected] : facts.items()) {
    SCOPED_TRACE(name);
    const std::string path = kGolden + name + ".pt";
    ++files;
    if (expected == "refused") {
      EXPECT_THAT(refusal(path), HasSubstr(name + ".pt"));
      continue;
    }
    const auto tensors = read_weights(path);
    ASSERT_EQ(tensors.size(), expected.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = expected[i];
      EXPECT_EQ(tensors[i].name, tensor["name"].get<std::string>());
      const auto dtype = tensor["dtype"].get<std::string>();
      EXPECT_EQ(type_of(tensors[i].dtype), dtype == "float16" || dtype == "bfloat16" ? "float32" : dtype);
      EXPECT_EQ(tensors[i].shape, tensor["shape"].get<std::vector<std::int64_t>>());
      EXPECT_EQ(values_of(tensors[i]), tensor["values"].get<std::vector<double>>());
    }
  }
  EXPECT_EQ(files, 27);
}

TEST(TorchFile, TypesThatAreNotReadAreNamed) {
  EXPECT_THAT(refusal(kGolden + "short.pt"), HasSubstr("'weight' is a tensor of 'torch ShortStorage'"));
  EXPECT_THAT(refusal(kGolden + "namespace.pt"), HasSubstr("an object of 'argparse Namespace'"));
}

TEST(TorchFile, PickledModelIsRefusedWithTheNameThatItWouldCall) {
  EXPECT_THAT(refusal(kGolden + "whole_model.pt"), HasSubstr("torch.nn.modules.container Sequential"));
}

// Each byte less is an error: no value of what is left over, no crash, no memory from a length that is not there.
TEST(TorchFile, FilesCutAtAnyByteAreRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory.path("cut.pt");
  for (const char* name : {"bf16.pt", "half_legacy.pt", "strided_legacy.pt"}) {
    const std::string whole = read_file(kGolden + name);
    for (std::size_t size = 0; size < whole.size(); ++size) {
      write_file(path, whole.substr(0, size));
      ASSERT_NE(refusal(path), "nothing was thrown") << name << " cut at " << size << " of " << whole.size();
    }
  }
}

TEST(TorchFile, FlippedBytesAreErrorsAtWorst) {
  const TemporaryDirectory directory;
  const std::string path = directory.path("flipped.pt");
  std::uint32_t random = 1;
  for (const char* name : {"zip.pt", "legacy.pt", "strided_legacy.pt", "wrapped.pt"}) {
    const std::string whole = read_file(kGolden + name);
    for (int i = 0; i < 300; ++i) {
      std::string content = whole;
      for (int k = 0; k < 1 + i % 3; ++k) {
        random = random * 1664525u + 1013904223u;
        content[(random >> 8) % content.size()] = static_cast<char>(random >> 3);
      }
      write_file(path, content);
      EXPECT_FALSE(refusal(path).empty());
    }
  }
}

class HandMade : public ::testing::Test {
 protected:
  std::string outcome(const std::string& content) {
    write_file(directory_.path("x.pt"), content);
    return refusal(directory_.path("x.pt"));
  }
  TemporaryDirectory directory_;
};

TEST_F(HandMade, ValidFileIsRead) {
  write_file(directory_.path("x.pt"), legacy(dictionary(Pickle().tensor(4, 1, {3}, {1}))));
  const auto tensors = read_torch_file(directory_.path("x.pt")).tensors;
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(values_of(tensors[0]), (std::vector<double>{2, 3, 4}));
}

TEST_F(HandMade, TensorsStayWithinTheirStorage) {
  const auto said = [&](std::int64_t offset, const std::vector<std::int64_t>& sizes,
                        const std::vector<std::int64_t>& strides) {
    return outcome(legacy(dictionary(Pickle().tensor(4, offset, sizes, strides))));
  };
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(said(0, {2, 2}, {2, 1}), "nothing was thrown");
  EXPECT_THAT(said(1, {4}, {1}), HasSubstr("reaches element 4 of a storage of 4"));
  EXPECT_THAT(said(-1, {2}, {1}), HasSubstr("storage of 4"));
  EXPECT_THAT(said(0, {5}, {0}), HasSubstr("larger than its storage"));
  EXPECT_THAT(said(0, {2}, {kHuge}), HasSubstr("storage of 4"));
  EXPECT_THAT(said(kHuge, {2, 2}, {kHuge, kHuge}), HasSubstr("storage"));
  EXPECT_THAT(said(0, {kHuge, kHuge}, {0, 0}), HasSubstr("larger than its storage"));
  EXPECT_THAT(said(0, {-1}, {1}), HasSubstr("negative size"));
  EXPECT_THAT(said(0, {2}, {-1}), HasSubstr("negative size"));
  EXPECT_THAT(said(0, {2, 2}, {1}), HasSubstr("2 sizes and 1 strides"));
  EXPECT_EQ(said(9, {0}, {1}), "nothing was thrown");
}

TEST_F(HandMade, StoragesClaimNoMoreThanTheFileHas) {
  const std::string root = dictionary(Pickle().tensor(4, 0, {4}, {1}));
  EXPECT_EQ(outcome(legacy(root, 4)), "nothing was thrown");
  EXPECT_THAT(outcome(legacy(root, 5)), HasSubstr("claims a storage of 5 elements in the 16 bytes"));
  EXPECT_THAT(outcome(legacy(root, ~std::uint64_t{0})), HasSubstr("claims a storage"));
  EXPECT_THAT(outcome(legacy(root, 3)), HasSubstr("too few for 4 elements"));
  EXPECT_THAT(outcome(legacy(dictionary(Pickle().tensor(-4, 0, {4}, {1})))), HasSubstr("negative size"));
}

// What a file says once and means often: what is made of it stays in proportion to its bytes.
TEST_F(HandMade, SharingMakesNoSmallFileHuge) {
  // `uses` tensors of one storage of 256 KiB, each named by a number.
  constexpr std::int32_t kElements = 1 << 16;
  const auto shared = [&](int uses) {
    Pickle root;
    root.op("}(");
    for (int i = 0; i < uses; ++i) {
      Pickle tensor;
      tensor.tensor(kElements, 0, {kElements}, {1});
      const std::string name = fmt::format("weight{:02}", i);
      root.text(name).op(tensor.bytes.substr(2 + 5 + 6));  // after the head and its name
    }
    std::string file = legacy(root.op("u.").bytes, kElements);
    return file.append(4 * kElements - 16, '\0');
  };
  EXPECT_EQ(outcome(shared(3)), "nothing was thrown");
  EXPECT_THAT(outcome(shared(60)), HasSubstr("share storages so often"));

  // A dictionary that holds the one before twice, and so on: 2^40 ways lead through it.
  std::string nested = "}q" + std::string(1, '\0');
  for (char i = 1; i <= 40; ++i) {
    const std::string again = "h" + std::string(1, static_cast<char>(i - 1));
    nested = "}(" + Pickle().text("a").bytes.substr(2) + nested + Pickle().text("b").bytes.substr(2) + again + "uq" + i;
  }
  EXPECT_THAT(outcome(legacy(Pickle().op(nested + ".").bytes)), HasSubstr("is no tensor but a dictionary"));

  const auto sizes = std::vector<std::int64_t>(17, 1);
  EXPECT_THAT(outcome(legacy(dictionary(Pickle().tensor(4, 0, sizes, sizes)))), HasSubstr("a tensor with 17 axes"));
  Pickle keyed;
  keyed.text("weight").op("ctorch._utils\n_rebuild_tensor_v2\n((").text("storage").op("ctorch\nFloatStorage\n");
  keyed.text(std::string(65, '7')).text("cpu").number(4).op("tQ");
  EXPECT_THAT(outcome(legacy(dictionary(keyed))), HasSubstr("a storage with a key of 65 bytes"));
}

std::string number(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i, value >>= 8) text += static_cast<char>(value);
  return text;
}

// An archive of stored entries, without checksums. With `within`, each lies within the one before it.
std::string archive_of(const std::vector<std::pair<std::string, std::string>>& entries, bool within = false) {
  std::string file, directory;
  std::size_t size_after = 0;  // bytes of the entries that come after
  if (within)
    for (const auto& [name, content] : entries) size_after += 30 + name.size() + content.size();
  for (const auto& [name, content] : entries) {
    if (within) size_after -= 30 + name.size() + content.size();
    const std::size_t size = content.size() + size_after;
    const std::string common = number(10, 2) + number(0, 2) + number(0, 2) + number(0, 4) + number(0, 4) +
                               number(size, 4) + number(size, 4) + number(name.size(), 2) + number(0, 2);
    directory += "PK\1\2" + number(10, 2) + common + number(0, 10) + number(file.size(), 4) + name;
    file += "PK\3\4" + common + name + content;
  }
  return file + directory + "PK\5\6" + number(0, 4) + number(entries.size(), 2) + number(entries.size(), 2) +
         number(directory.size(), 4) + number(file.size(), 4) + number(0, 2);
}

// Storages are held while they are used: together they are no more than the file.
TEST_F(HandMade, EntriesWithinEachOtherAreRefused) {
  constexpr int kEntries = 40, kElements = 16;
  Pickle root;
  root.op("}(");
  std::vector<std::pair<std::string, std::string>> entries;
  for (int i = 0; i < kEntries; ++i) {
    root.text(std::to_string(i)).op("ctorch._utils\n_rebuild_tensor_v2\n((").text("storage");
    root.op("ctorch\nFloatStorage\n").text(std::to_string(i)).text("cpu").number(kElements).op("tQ");
    root.op(std::string("K\0K\x10\x85K\1\x85\x89NtR", 12));
    entries.emplace_back("x/data/" + std::to_string(i), std::string(4 * kElements, '\0'));
  }
  root.op("u.");
  entries.emplace_back("x/data.pkl", root.bytes);
  write_file(directory_.path("x.pt"), archive_of(entries));
  EXPECT_EQ(refusal(directory_.path("x.pt")), "nothing was thrown");
  EXPECT_THAT(outcome(archive_of(entries, true)), HasSubstr("its entries overlap"));
}

// Parameters that are views of one storage (torch.nn.utils.vector_to_parameters), buffers between them: each storage is
// read once, however often others come in between.
TEST_F(HandMade, ViewsOfOneStorageAreNoBomb) {
  constexpr std::int64_t kElements = 1 << 18, kViews = 64;
  Pickle root;
  root.op("}(");
  const auto add = [&](const std::string& name, const std::string& key, std::int64_t elements, std::int64_t offset,
                       std::int64_t count) {
    root.text(name).op("ctorch._utils\n_rebuild_tensor_v2\n((").text("storage").op("ctorch\nFloatStorage\n").text(key);
    root.text("cpu").number(static_cast<std::int32_t>(elements)).op("tQ");
    root.long_number(static_cast<std::uint64_t>(offset)).long_number(static_cast<std::uint64_t>(count)).op("\x85");
    root.op("K\1\x85\x89NtR");
  };
  for (std::int64_t i = 0; i < kViews; ++i) {
    add(fmt::format("{}.weight", i), "0", kElements, i * (kElements / kViews), kElements / kViews);
    add(fmt::format("{}.running_mean", i), "1", 1, 0, 1);
  }
  root.op("u.");
  std::string flat(4 * kElements, '\0');
  for (std::int64_t i = 0; i < kElements; ++i) {
    const auto value = static_cast<float>(i);
    std::memcpy(flat.data() + 4 * i, &value, 4);
  }
  write_file(
      directory_.path("x.pt"),
      archive_of({{"x/data.pkl", root.bytes}, {"x/data/0", flat}, {"x/data/1", std::string("\0\0\x80\x3f", 4)}}));
  const auto tensors = read_torch_file(directory_.path("x.pt")).tensors;
  ASSERT_EQ(tensors.size(), std::size_t{2 * kViews});
  for (std::size_t i = 0; i < tensors.size(); i += 2) {
    EXPECT_EQ(values_of(tensors[i]).front(),
              static_cast<double>(i / 2 * (kElements / kViews)));  // NOLINT(bugprone-integer-division)
    EXPECT_EQ(values_of(tensors[i + 1]), std::vector<double>{1});
  }
}

TEST_F(HandMade, NothingIsEverCalled) {
  const auto said = [&](const std::string& ops) { return outcome(legacy(Pickle().op(ops).bytes)); };
  EXPECT_THAT(said("cos\nsystem\n(X\x04" + std::string(3, '\0') + "true" + "tR."),
              HasSubstr("an object of 'os system'"));
  EXPECT_THAT(said("cbuiltins\neval\n."), HasSubstr("the name 'builtins eval'"));
  EXPECT_THAT(said("\x8c\x02os\x8c\x06system\x93)R."), HasSubstr("an object of 'os system'"));
  EXPECT_THAT(said("ccollections\nOrderedDict\n(I1\ntR."), HasSubstr("the operation 0x49"));
  EXPECT_THAT(said("(cos\nsystem\no."), HasSubstr("an object of 'os system'"));
  EXPECT_THAT(said("cos\nsystem\n)\x81}b."), HasSubstr("an object of 'os system'"));
  EXPECT_THAT(said("cos\nsystem\n)}\x92."), HasSubstr("an object of 'os system'"));
  EXPECT_THAT(said("cos\nsystem\n)R)R."), HasSubstr("an object of an unknown class"));
  EXPECT_THAT(said("N)R."), HasSubstr("what is called is None"));
  EXPECT_THAT(said("\x82\x01."), HasSubstr("the operation 0x82"));  // a registered extension
  EXPECT_THAT(said("\x97."), HasSubstr("the operation 0x97"));      // bytes that are elsewhere
  EXPECT_THAT(said("}(X\x01" + std::string(3, '\0') + "wcos\nsystem\n)Ru."),
              HasSubstr("'w' is no tensor but an object of"));
}

// What says that a tensor's bytes are not its values, in the ways of torch/_utils.py.
TEST_F(HandMade, TensorsOfOtherValuesThanTheirBytesAreRefused) {
  const auto said = [&](const std::string& function, const std::string& arguments) {
    Pickle pickle;
    pickle.text("weight").op("c" + function + "\n(").op(arguments).op("tR");
    return outcome(legacy(dictionary(pickle)));
  };
  const std::string v2 = "torch._utils\n_rebuild_tensor_v2";
  const std::string plain = Pickle().storage("FloatStorage", 4).op("K\0K\4\x85K\1\x85\x89N"s).bytes.substr(2);
  const auto flag = [](const std::string& name, const std::string& value) {
    return Pickle().op("}").text(name).op(value + "s").bytes.substr(2);
  };
  for (const std::string& metadata : {std::string(), "N"s, "}"s, flag("neg", "\x89"), flag("conj", "\x89")})
    EXPECT_EQ(said(v2, plain + metadata), "nothing was thrown") << metadata;
  EXPECT_THAT(said(v2, plain + flag("neg", "\x88")),
              HasSubstr("'weight' is a tensor whose values are its bytes' negatives"));
  EXPECT_THAT(said(v2, plain + flag("conj", "\x88")),
              HasSubstr("'weight' is a tensor whose values are its bytes' conj"));
  EXPECT_THAT(said(v2, plain + flag("zap", "K\1")), HasSubstr("'weight' is a tensor with the flag 'zap'"));
  EXPECT_THAT(said(v2, plain + "K\1"), HasSubstr("a tensor's metadata is a number"));
  EXPECT_THAT(said("torch._utils\n_rebuild_tensor_v3", plain + "ctorch\nfloat8_e4m3fn\n"),
              HasSubstr("'weight' is a tensor of the type 'torch float8_e4m3fn'"));
  EXPECT_THAT(said("torch._utils\n_rebuild_qtensor", plain), HasSubstr("'weight' is a quantized tensor"));
  EXPECT_THAT(said("torch._utils\n_rebuild_sparse_tensor", "N"), HasSubstr("'weight' is a sparse tensor"));
  EXPECT_THAT(said("torch._utils\n_rebuild_meta_tensor_no_storage", "N"), HasSubstr("on the meta device"));
  const std::string with_attributes = "torch._tensor\n_rebuild_from_type_v2";
  const auto of_class = [&](const std::string& type) { return "c" + v2 + "\nc" + type + "\n(" + plain + "t}"; };
  EXPECT_EQ(said(with_attributes, of_class("torch.nn.parameter\nParameter")), "nothing was thrown");
  EXPECT_THAT(said(with_attributes, of_class("mine\nPacked")),
              HasSubstr("'weight' is a tensor of the class 'mine Packed'"));
  EXPECT_THAT(outcome(legacy(dictionary(Pickle().tensor(4, 0, {4}, {1}).op("}b")))),
              HasSubstr("a tensor that is given another state"));
}

// torch.save(…, _use_new_zipfile_serialization=False, pickle_protocol=N): from 4 on, values come in frames.
TEST_F(HandMade, OfNewerProtocolsAreRead) {
  const std::string whole = legacy(dictionary(Pickle().tensor(4, 0, {4}, {1})));
  EXPECT_EQ(outcome(whole), "nothing was thrown");
  for (const char protocol : {'\3', '\4', '\5'}) {
    const std::string frame = protocol > 3 ? "\x95\x0d\0\0\0\0\0\0\0"s : ""s;
    EXPECT_EQ(outcome("\x80"s + protocol + frame + whole.substr(2)), "nothing was thrown") << int{protocol};
    write_file(directory_.path("x.pt"), "\x80"s + protocol + frame + whole.substr(2));
    EXPECT_EQ(read_weights(directory_.path("x.pt")).size(), 1U);
  }
}

// By read_weights(), which has to choose between kinds of files.
TEST_F(HandMade, OtherFilesAreNamed) {
  const auto said = [&](const std::string& content) {
    write_file(directory_.path("x.bin"), content);
    try {
      read_weights(directory_.path("x.bin"));
    } catch (const IoError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_THAT(said("\x80\4\x95\2\0\0\0\0\0\0\0N."s), HasSubstr("it is a pickle, but none of torch.save()"));
  EXPECT_THAT(said(std::string(257, '\0') + "ustar" + std::string(300, '\0')), HasSubstr("it is a tar archive"));
  EXPECT_THAT(said(archive_of({{"m/data.pkl", ""}, {"m/constants.pkl", ""}})), HasSubstr("a TorchScript program"));
  EXPECT_THAT(said(archive_of({{"m/archive_format", "pt2"}, {"m/x.npy", ""}})), HasSubstr("of torch.export.save()"));
  EXPECT_THAT(said(archive_of({{"w.npy", ""}})), HasSubstr("an archive of NumPy's arrays"));
  EXPECT_THAT(said(archive_of({{"w", ""}})), HasSubstr("the archive has no data.pkl"));
  // A header of 0x0280 bytes is no pickle of protocol 2.
  const std::string header = R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  EXPECT_EQ(said("\x80\2\0\0\0\0\0\0"s + header + std::string(0x280 - header.size(), ' ') + "x"), "nothing was thrown");
}

class UnpicklerTest : public ::testing::Test {
 protected:
  static std::string outcome(const std::string& ops) {
    std::size_t at = 0;
    try {
      unpickle(std::as_bytes(std::span(ops)), at, "it");
      return at == ops.size() ? "read" : "read in part";
    } catch (const IoError& error) {
      return error.what();
    }
  }
};

TEST_F(UnpicklerTest, ValuesOfAllKinds) {
  const std::string ops =
      Pickle().op("(NK\x05").number(-7).op("\x88\x89)G\x3f\xe0" + std::string(6, '\0')).text("é").op("]}t.").bytes;
  std::size_t at = 0;
  const Unpickled read = unpickle(std::as_bytes(std::span(ops)), at, "it");
  EXPECT_EQ(at, ops.size());
  const auto& items = std::get<PickledValue::Sequence>(read.root->is).items;
  ASSERT_EQ(items.size(), 10u);
  EXPECT_EQ(std::get<std::int64_t>(items[1]->is), 5);
  EXPECT_EQ(std::get<std::int64_t>(items[2]->is), -7);
  EXPECT_TRUE(std::get<bool>(items[3]->is));
  EXPECT_EQ(std::get<double>(items[6]->is), 0.5);
  EXPECT_EQ(std::get<std::string>(items[7]->is), "é");
}

TEST_F(UnpicklerTest, MalformedPicklesNameTheByte) {
  EXPECT_THAT(outcome(""), HasSubstr("at byte 0 of its pickle: it is cut"));
  EXPECT_THAT(outcome("N"), HasSubstr("at byte 1 of its pickle: it is cut"));
  EXPECT_THAT(outcome("X\xff\xff\xff\xffzz"), HasSubstr("it is cut"));
  EXPECT_THAT(outcome("."), HasSubstr("values left over"));
  EXPECT_THAT(outcome("NN."), HasSubstr("values left over"));
  EXPECT_THAT(outcome("(."), HasSubstr("values left over"));
  EXPECT_THAT(outcome("Na."), HasSubstr("a value is missing"));
  EXPECT_THAT(outcome("NNa."), HasSubstr("no list"));
  EXPECT_THAT(outcome("}(Nu."), HasSubstr("a key without a value"));
  EXPECT_THAT(outcome("t."), HasSubstr("a mark is missing"));
  EXPECT_THAT(outcome("h\x01."), HasSubstr("not there before"));
  EXPECT_THAT(outcome("\x80\x09."), HasSubstr("protocol 9"));
  EXPECT_THAT(outcome("N(\x85."), HasSubstr("a value is missing"));  // from below a mark
  EXPECT_THAT(outcome("NR."), HasSubstr("a value is missing"));
  EXPECT_THAT(outcome("NNR."), HasSubstr("arguments is None"));
  EXPECT_THAT(outcome("NQ."), HasSubstr("a persistent id is None"));
}

// As in Python; whoever made it recursive finds nobody who walks it.
TEST_F(UnpicklerTest, ValuesMayContainThemselvesAndNestWithoutEnd) {
  EXPECT_EQ(outcome(std::string("]q\0h\0a.", 7)), "read");
  EXPECT_EQ(outcome(std::string("}q\0(X\1\0\0\0ah\0u.", 14)), "read");
  EXPECT_EQ(outcome(std::string("]q\0(h\0t0.", 9)), "read");
  EXPECT_EQ(outcome("N" + std::string(100000, '\x85') + "."), "read");
  EXPECT_EQ(outcome(std::string(100000, ']') + std::string(99999, 'a') + "."), "read");
}

TEST_F(UnpicklerTest, UnusedValuesAreSkipped) {
  EXPECT_EQ(outcome(std::string("\x8a\x09", 2) + std::string(9, '\1') + "."), "read");
  EXPECT_EQ(outcome(std::string("\x8b\x09\0\0\0", 5) + std::string(9, '\1') + "."), "read");
  EXPECT_EQ(outcome(std::string("\x80\x04\x95\x03\0\0\0\0\0\0\0C\1x\x94.", 16)), "read");
  EXPECT_EQ(outcome(std::string("\x8e\1\0\0\0\0\0\0\0x.", 11)), "read");
  EXPECT_EQ(outcome(std::string("\x8f\x94(K\1\x90.", 7)), "read");
  EXPECT_EQ(outcome(std::string("(K\1\x91.", 5)), "read");
  EXPECT_EQ(outcome("N20."), "read");
  EXPECT_EQ(outcome("N(NN1."), "read");
  EXPECT_EQ(outcome(std::string("cx\ny\n)\x81q\0(X\1\0\0\0ah\0u(Ne.", 23)), "read");
  // Lengths are not believed.
  EXPECT_THAT(outcome("\x8e\xff\xff\xff\xff\xff\xff\xff\xffz"), HasSubstr("it is cut"));
  EXPECT_THAT(outcome("\x8d\xff\xff\xff\xff\xff\xff\xff\x7fz"), HasSubstr("it is cut"));
  EXPECT_THAT(outcome("\x8b\xff\xff\xff\x7fz"), HasSubstr("it is cut"));
}

// A list of which many ordered dictionaries were made would be copied each time.
TEST_F(UnpicklerTest, PythonTwosOrderedDictionaries) {
  const std::string ops =
      Pickle().op("ccollections\nOrderedDict\n](]q").op(std::string("\0(U\1aK\1ee\x85R.", 12)).bytes;
  std::size_t at = 0;
  const Unpickled read = unpickle(std::as_bytes(std::span(ops)), at, "it");
  const auto& items = std::get<PickledValue::Dict>(read.root->is).items;
  ASSERT_EQ(items.size(), 1u);
  EXPECT_EQ(std::get<std::string>(items[0].first->is), "a");
}

}  // namespace
}  // namespace lockstep::nn
