// The status server's parser, its sockets, and what it says of a run.
#include "trainer/status_server.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/flight_record.h"
#include "base/log.h"
#include "base/network.h"
#include "tests/support/temporary_directory.h"
#include "trainer/http_server.h"

namespace lockstep::trainer {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Parsed {
  const char* bytes;
  int status;
  const char *path = "", *authorization = "";
};

TEST(HttpRequests, AreTakenWholeAndInOneWay) {
  const std::vector<Parsed> cases = {
      {"", 0},
      {"GET /metrics HT", 0},
      {"GET /metrics HTTP/1.1\r\n", 0},
      {"GET /metrics HTTP/1.1\r\nHost: a\r\n", 0},
      {"GET /metrics HTTP/1.1\r\n\r\n", 200, "/metrics"},
      {"GET /metrics HTTP/1.0\n\n", 200, "/metrics"},
      {"GET /healthz?verbose=1 HTTP/1.1\r\nHost: a:1\r\nAccept:*/*\r\n\r\nmore", 200, "/healthz"},
      {"POST / HTTP/1.1\r\nAUTHORIZATION:  Bearer x \r\n\r\n", 200, "/", "Bearer x"},
      {"GET / HTTP/1.1\r\nAuthorization: a\r\nauthorization: b\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nAuthorization:\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nHost:\r\n\r\n", 200, "/"},
      {"GET / HTTP/1.1\r\n folded: a\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nA\r\n\r\n", 400},
      {"GET / HTTP/1.1\r\nA: b\1\r\n\r\n", 400},
      {"GET  / HTTP/1.1\r\n\r\n", 400},
      {"GET /a b HTTP/1.1\r\n\r\n", 400},
      {"GET metrics HTTP/1.1\r\n\r\n", 400},
      {"GET /\r\n\r\n", 400},
      {"\r\n", 400},
      {"G T / HTTP/1.1\r\n\r\n", 400},
      {"GET / HTTP/2\r\n\r\n", 505},
      {"\x16\x03\x01\n", 400},
  };
  for (const Parsed& each : cases) {
    const HttpRequest request = parse_http_request(each.bytes);
    EXPECT_EQ(request.status, each.status) << each.bytes;
    if (each.status != 200) continue;
    EXPECT_EQ(request.path, each.path) << each.bytes;
    EXPECT_EQ(request.authorization, each.authorization) << each.bytes;
  }
  const std::string endless = "GET / HTTP/1.1\r\nA: " + std::string(kMostRequestBytes, 'b');
  EXPECT_EQ(parse_http_request(endless).status, 431);
  EXPECT_EQ(parse_http_request(std::string(kMostRequestBytes + 1, 'G')).status, 431);
  EXPECT_EQ(parse_http_request(std::string(kMostRequestBytes, 'G')).status, 0);
}

UniqueFd connect_to(int port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = parse_address("127.0.0.1", port);
  if (::connect(socket.get(), address->get(), address->length) != 0) socket.reset();
  return socket;
}

void say(const UniqueFd& socket, const std::string& text) {
  // The other end may have closed.
  static_cast<void>(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL));
}

/// All that comes until the other end closes.
std::string heard(const UniqueFd& socket) {
  std::string text;
  char bytes[1000];
  for (ssize_t got = 0; (got = ::recv(socket.get(), bytes, sizeof bytes, 0)) > 0;)
    text.append(bytes, static_cast<std::size_t>(got));
  return text;
}

std::string answer_to(int port, const std::string& request) {
  const UniqueFd socket = connect_to(port);
  say(socket, request);
  return heard(socket);
}

std::string get(int port, const std::string& path, const std::string& headers = {}) {
  return answer_to(port, "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n");
}

struct Server {
  explicit Server(std::string token = {}, std::string body = "yes")
      : listener(listen_at(*parse_address("127.0.0.1", 0))),
        port(own_address(listener)->port()),
        server(std::move(listener), std::move(token), [body = std::move(body)](const HttpRequest& request) {
          return HttpAnswer{.status = request.path == "/" ? 200 : 404, .body = body};
        }) {}
  UniqueFd listener;
  int port;
  HttpServer server;
};

TEST(HttpServers, AnswerOneRequestOfAConnection) {
  const Server server;
  EXPECT_EQ(
      get(server.port, "/"),
      "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
      "yes");
  EXPECT_THAT(get(server.port, "/x"), StartsWith("HTTP/1.1 404 Not Found\r\n"));
  EXPECT_THAT(answer_to(server.port, "hello\r\n\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(answer_to(server.port, "GET / HTTP/1.1\r\n" + std::string(20'000, 'a')), StartsWith("HTTP/1.1 431 "));
  const UniqueFd in_parts = connect_to(server.port);
  for (const char c : std::string("GET / HTTP/1.1\r\n\r\n")) say(in_parts, {c});
  EXPECT_THAT(heard(in_parts), StartsWith("HTTP/1.1 200 "));
}

TEST(HttpServers, DemandTheirToken) {
  const Server server("0123456789abcdef");
  EXPECT_THAT(get(server.port, "/"), AllOf(StartsWith("HTTP/1.1 401 "), HasSubstr("WWW-Authenticate: Bearer\r\n")));
  for (const char* wrong : {"Bearer 0123456789abcdeg", "Bearer 0123456789abcde", "Basic 0123456789abcdef",
                            "0123456789abcdef", "Bearer", "B"})
    EXPECT_THAT(get(server.port, "/", std::string("Authorization: ") + wrong + "\r\n"), StartsWith("HTTP/1.1 401 "))
        << wrong;
  EXPECT_THAT(get(server.port, "/", "Authorization: bearer 0123456789abcdef\r\n"), StartsWith("HTTP/1.1 200 "));
}

// A page of somebody else's whose name has been made this host's address.
TEST(HttpServers, WithoutATokenAnswerNoNames) {
  for (const char* host : {"", "localhost", "LOCALHOST:80", "127.0.0.1", "10.0.0.1:9090", "[::1]", "[::1]:80"})
    EXPECT_TRUE(is_address_or_localhost(host)) << host;
  for (const char* host :
       {"example.org", "localhost.example.org:80", "127.0.0.1.example.org", "[::1", "[]", ":80", "::1"})
    EXPECT_FALSE(is_address_or_localhost(host)) << host;
  const std::string request = "GET / HTTP/1.1\r\nHost: example.org:80\r\n";
  EXPECT_THAT(answer_to(Server().port, request + "\r\n"), StartsWith("HTTP/1.1 403 Forbidden\r\n"));
  const std::string token = "0123456789abcdef";
  EXPECT_THAT(answer_to(Server(token).port, request + "Authorization: Bearer " + token + "\r\n\r\n"),
              StartsWith("HTTP/1.1 200 "));
}

// Those who say nothing, half of something, or read nothing, in greater number than there are places.
TEST(HttpServers, KeepNobodyOutForClientsThatHang) {
  const Server server({}, std::string(std::size_t{8} << 20, 'x'));
  std::vector<UniqueFd> hanging;
  for (std::size_t i = 0; i < HttpServer::kMostConnections + 8; ++i) {
    hanging.push_back(connect_to(server.port));
    if (i % 4 == 1) say(hanging.back(), "GET / HTTP/1.1\r\nA: ");
    if (i % 4 == 3) say(hanging.back(), "GET / HTTP/1.1\r\n\r\n");
  }
  EXPECT_EQ(get(server.port, "/").size(), (std::size_t{8} << 20) + 104);
  for (int i = 0; i < 2 * HttpServer::kMostPerSecond; ++i) connect_to(server.port);
  EXPECT_THAT(get(server.port, "/x"), StartsWith("HTTP/1.1 404 "));
}

TEST(HttpServers, CloseConnectionsThatSayNothing) {
  const Server server;
  const UniqueFd silent = connect_to(server.port), half = connect_to(server.port);
  say(half, "GET / HT");
  EXPECT_EQ(heard(silent), "");  // it comes to an end
  EXPECT_EQ(heard(half), "");
}

// ---- Of a run ----

TrainConfig config_with(double stall_warning_seconds = 0) {
  TrainConfig config;
  config.status_port = 0;
  config.stall_warning_seconds = stall_warning_seconds;
  return config;
}

/// One whose log line says the port.
struct Running {
  explicit Running(const TrainConfig& config) {
    set_log_level(LogLevel::kInfo);
    ::testing::internal::CaptureStderr();
    server = make_status_server(config, 12);
    const std::string said = ::testing::internal::GetCapturedStderr();
    port = std::stoi(said.substr(said.find("127.0.0.1:") + 10));
  }
  std::unique_ptr<Follower> server;
  int port = 0;
};

TEST(StatusServers, SayWhatARunReports) {
  const Running run(config_with());
  EXPECT_THAT(get(run.port, "/metrics"),
              AllOf(HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
                    HasSubstr("\n# TYPE lockstep_step gauge\nlockstep_step 12\n"), Not(HasSubstr("lockstep_loss"))));
  RunReport about;
  about.model = "a\"b\\";
  about.data = "digits";
  about.steps = 90;
  about.ranks.resize(2);
  about.version = "1 x";
  run.server->write(about);
  run.server->write(RestartReport{.attempt = 2, .cause = {}});
  run.server->write(StepReport{.step = 13,
                               .epoch = 2,
                               .loss = NAN,
                               .lr = 1e-3,
                               .grad_norm = INFINITY,
                               .step_ms = 250,
                               .comm_wait_ms = 1.5,
                               .samples_per_s = 400,
                               .samples = 1300,
                               .memory_bytes = 77,
                               .scaling = LossScaling{.scale = 1024}});
  run.server->write(CheckpointReport{.step = 10});
  run.server->write(
      EvalReport{.step = 11, .loss = 0.5, .accuracy = NAN, .errors = ErrorReport{.mae = 2}, .own = {{"hits", 3}}});
  run.server->write(EvalReport{.step = 11, .loss = 0.25, .accuracy = NAN, .of_average = true});
  EXPECT_THAT(
      get(run.port, "/metrics"),
      AllOf(HasSubstr("lockstep_info{version=\"1 x\",model=\"a\\\"b\\\\\",data=\"digits\",ranks=\"2\"} 1\n"),
            HasSubstr("\nlockstep_planned_steps 90\n"), HasSubstr("\nlockstep_healthy 1\n"),
            HasSubstr("\nlockstep_restarts 2\n"), HasSubstr("\nlockstep_step 13\n"), HasSubstr("\nlockstep_epoch 2\n"),
            HasSubstr("\nlockstep_loss NaN\n"), HasSubstr("\nlockstep_learning_rate 0.001\n"),
            HasSubstr("\nlockstep_gradient_norm +Inf\n"), HasSubstr("\nlockstep_loss_scale 1024\n"),
            HasSubstr("\n# TYPE lockstep_samples_total counter\nlockstep_samples_total 1300\n"),
            HasSubstr("\nlockstep_samples_per_second 400\n"), HasSubstr("\nlockstep_step_seconds 0.25\n"),
            HasSubstr("\nlockstep_communication_wait_seconds 0.0015\n"), HasSubstr("\nlockstep_memory_bytes 77\n"),
            HasSubstr("\nlockstep_checkpoint_step 10\n")));
  EXPECT_THAT(get(run.port, "/metrics"),
              AllOf(HasSubstr("\nlockstep_validation_step{weights=\"last\"} 11\n"),
                    HasSubstr("\nlockstep_validation_loss{weights=\"last\"} 0.5\n"
                              "lockstep_validation_loss{weights=\"average\"} 0.25\n"),
                    HasSubstr("\nlockstep_validation_mae{weights=\"last\"} 2\n"),
                    HasSubstr("\nlockstep_validation_hits{weights=\"last\"} 3\n"), Not(HasSubstr("accuracy"))));
  EXPECT_THAT(get(run.port, "/healthz"), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("\r\n\r\nok\n")));
  EXPECT_THAT(get(run.port, "/"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(answer_to(run.port, "POST /metrics HTTP/1.1\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("\r\nAllow: GET\r\n")));
}

TEST(StatusServers, AreRedWhenNothingMoves) {
  const auto health = [](const Running& run) { return get(run.port, "/healthz"); };
  const Running run(config_with(0.05));
  flight::set_phase(flight::Phase::kBackward);
  std::this_thread::sleep_for(100ms);
  EXPECT_THAT(health(run), AllOf(StartsWith("HTTP/1.1 503 Service Unavailable\r\n"), HasSubstr("\r\n\r\nno step for "),
                                 HasSubstr("backward")));
  EXPECT_THAT(get(run.port, "/metrics"), HasSubstr("\nlockstep_healthy 0\n"));
  flight::set_phase(flight::Phase::kEvaluation);  // a batch of it
  const Running patient(config_with(100));
  EXPECT_THAT(health(patient), StartsWith("HTTP/1.1 200 "));
  run.server->write(StepReport{.step = 1, .step_ms = 40'000});  // steps that take so long
  std::this_thread::sleep_for(100ms);
  EXPECT_THAT(health(run), StartsWith("HTTP/1.1 200 "));
  run.server->write(StepReport{.step = 2, .step_ms = 1});
  std::this_thread::sleep_for(100ms);
  EXPECT_THAT(health(run), StartsWith("HTTP/1.1 503 "));
  flight::set_phase(flight::Phase::kRunning);
}

std::string refusal_of(const TrainConfig& config) {
  try {
    make_status_server(config, 0);
  } catch (const Error& error) {
    return error.line();
  }
  return "none";
}

TEST(StatusServers, ListenElsewhereWithATokenOnly) {
  const testing::TemporaryDirectory directory;
  TrainConfig config = config_with();
  for (const char* address : {"0.0.0.0", "::", "192.0.2.1"}) {
    config.status_address = address;
    EXPECT_THAT(refusal_of(config), AllOf(HasSubstr("without a token"), HasSubstr("LOCKSTEP_STATUS_TOKEN")));
  }
  config.status_address = "localhost";
  EXPECT_THAT(refusal_of(config), HasSubstr("--status-address localhost is no IP address"));
  config.status_token_file = directory.write("token", "0123456789abcdef0123\n");
  config.status_address = "192.0.2.1";
  EXPECT_THAT(refusal_of(config), HasSubstr("an address of the host that rank 0 is on"));
  config.status_address = "";
  {
    const Running run(config);
    EXPECT_THAT(get(run.port, "/metrics"), StartsWith("HTTP/1.1 401 "));
    EXPECT_THAT(get(run.port, "/healthz", "Authorization: Bearer 0123456789abcdef0123\r\n"),
                StartsWith("HTTP/1.1 200 "));
    config.status_port = run.port;
    EXPECT_THAT(refusal_of(config),
                AllOf(HasSubstr(fmt::format("--status-port {}", run.port)), HasSubstr("is in use")));
  }
  EXPECT_EQ(refusal_of(config), "none");  // though the connections of that port have just ended
  for (const char* bad : {"", "short", "with a blank in it 0123456789", "0123456789abcdef\nanother line"}) {
    config.status_token_file = directory.write("token", bad);
    EXPECT_THAT(refusal_of(config),
                AllOf(HasSubstr("the token in " + directory.path("token")), HasSubstr("openssl rand")));
    EXPECT_THAT(refusal_of(config), Not(HasSubstr("another line")));
  }
  config.status_token_file = directory.path("none");
  EXPECT_THAT(refusal_of(config), HasSubstr("No such file"));
}

}  // namespace
}  // namespace lockstep::trainer
