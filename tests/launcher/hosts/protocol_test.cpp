#include "launcher/hosts/protocol.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "tests/support/golden_bytes.h"

namespace lockstep::launcher {
namespace {

std::vector<HostMessage> one_of_each() {
  const std::string bytes("\0\xff\n", 3);
  return {JobSetup{3, 2.5, true, "b", "token", "secret", "./train", "/home/eve"},
          ToRank{7, bytes},
          Run{"orted -mca ess env"},
          Hold{},
          Ping{-5},
          Pause{},
          Finish{},
          Ready{20001, "/tmp/x", "/dev/shm/x", "warning"},
          Refused{"why"},
          ConnectionOpened{1},
          FromRank{1u << 31, bytes},
          ConnectionClosed{2},
          RunOutput{bytes},
          RunEnded{{ExitStatus::How::kSignalled, 9}},
          Pong{1, 2},
          Notice{"text"},
          StartRank{5, {"lockstep", "_rank", "", bytes}, {{"RANK", "5"}, {"X", ""}}, {"PMI_RANK"}},
          EndRanks{},
          RankEnded{5, {ExitStatus::How::kNotStarted, 2}},
          Conclude{},
          Concluded{},
          FileRequest{FileRequest::What::kRemove, "ck/x"},
          FileReply{true},
          CloseConnection{4}};
}

TEST(HostProtocol, EveryMessageSurvivesThePipeInPieces) {
  std::string stream;
  for (const auto& message : one_of_each()) stream += encode_host(message);
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, stream.size()}) {
    HostDecoder decoder;
    std::string again;
    std::size_t index = 0;
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      decoder.feed(std::string_view(stream).substr(at, piece));
      while (const auto message = decoder.next()) {
        EXPECT_EQ(message->index(), index++);
        again += encode_host(*message);
      }
    }
    EXPECT_EQ(again, stream);
    EXPECT_EQ(index, std::variant_size_v<HostMessage>);
  }
}

TEST(HostProtocol, BytesOfEveryMessage) {
  constexpr const char* kGolden[] = {
      // NOLINTNEXTLINE(bugprone-suspicious-missing-comma): two do not fit on a line
      "390000000003000000000000000000044001010000006205000000746f6b656e06000000736563726574070000002e2f7472"
      "61696e2f686f6d652f657665",
      "07000000010700000000ff0a",
      "12000000026f72746564202d6d63612065737320656e76",
      "0000000003",
      "0800000004fbffffffffffffff",
      "0000000005",
      "0000000006",
      "2300000007214e0000060000002f746d702f780a0000002f6465762f73686d2f787761726e696e67",
      "0300000008776879",
      "040000000901000000",
      "070000000a0000008000ff0a",
      "040000000b02000000",
      "030000000c00ff0a",
      "050000000d0109000000",
      "100000000e01000000000000000200000000000000",
      "040000000f74657874",
      "4e000000100500000004000000080000006c6f636b73746570050000005f72616e6b000000000300000000ff0a0100000008"
      "000000504d495f52414e4b0400000052414e4b0100000035010000005800000000",
      "0000000011",
      "0900000012050000000202000000",
      "0000000013",
      "0000000014",
      "050000001502636b2f78",
      "010000001601",
      "040000001704000000",
  };
  const auto messages = one_of_each();
  ASSERT_EQ(std::size(kGolden), messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i)
    testing::expect_golden(kGolden[i], messages[i], encode_host, [](const std::string& bytes) {
      HostDecoder decoder;
      decoder.feed(bytes);
      return decoder.next().value();
    });
}

TEST(HostProtocol, NonsenseIsAnError) {
  const auto fails = [](const std::string& bytes) {
    HostDecoder decoder;
    decoder.feed(bytes);
    EXPECT_THROW(decoder.next(), MpiError);
  };
  fails(frame(200, ""));
  fails("\xff\xff\xff\xff\x01");
  // Each kind, cut short.
  const auto messages = one_of_each();
  for (std::size_t kind : {0u, 1u, 4u, 7u, 9u, 10u, 11u, 13u, 14u, 16u, 18u}) {
    ASSERT_EQ(messages[kind].index(), kind);
    fails(frame(kind, "\x01"));
  }
}

}  // namespace
}  // namespace lockstep::launcher
