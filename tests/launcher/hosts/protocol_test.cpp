#include "launcher/hosts/protocol.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"

namespace lockstep::launcher {
namespace {

std::vector<HostMessage> one_of_each() {
  const std::string bytes("\0\xff\n", 3);
  return {JobSetup{3, 2.5, true, "b", "token", "secret", "./train", "/home/eve"},
          ToRank{7, bytes},
          CloseConnection{7},
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
          FileReply{true}};
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
  for (std::size_t kind : {0u, 1u, 2u, 5u, 8u, 10u, 11u, 12u, 14u, 15u, 17u, 19u}) {
    ASSERT_EQ(messages[kind].index(), kind);
    fails(frame(kind, "\x01"));
  }
}

}  // namespace
}  // namespace lockstep::launcher
