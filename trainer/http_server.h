// A small HTTP server for a few clients, some of which may be hostile.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <string>
#include <thread>

#include "base/scope.h"
#include "lockstep/base/deadline.h"
#include "trainer/http_request.h"

namespace lockstep::trainer {

struct HttpAnswer {
  int status = 200;
  std::string body = {};
  std::string type = "text/plain; charset=utf-8";
  std::string header = {};  // a further one, with its end of line
};

/// Serves on a thread of its own: one request for each connection. Whatever clients do, it has kMostConnections at a
/// time, takes kMostPerSecond a second, and gives each kPatience to say what it wants, and as long to read the answer.
class HttpServer {
 public:
  static constexpr std::size_t kMostConnections = 32;
  static constexpr int kMostPerSecond = 100;
  static constexpr auto kPatience = std::chrono::seconds(5);

  /// `listener` does not block. With a token, requests without "Authorization: Bearer TOKEN" are refused; without one,
  /// those for a name (is_address_or_localhost). `answer` is called on the thread, for requests that
  /// parse_http_request() takes.
  HttpServer(UniqueFd listener, std::string token, std::function<HttpAnswer(const HttpRequest&)> answer);
  /// Ends at once: clients see their connections closed.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  struct Connection {
    UniqueFd socket;
    Clock::time_point until;
    std::string bytes = {};   // of the request; then of the answer
    std::size_t sent = 0;     // of that
    bool answers = false;     // it gets the answer
    bool ends = false;        // it has it, and is to close its end, or to have sent all that it wanted
    std::size_t ignored = 0;  // bytes that came since
    bool gone = false;
  };

  void run();
  void wait_and_serve();
  void accept_some();
  void make_room();
  void advance(Connection& connection);
  void read(Connection& connection);
  void write(Connection& connection);
  HttpAnswer answer_to(const HttpRequest& request) const;

  UniqueFd listener_, wakeup_;
  const std::string token_;
  const std::function<HttpAnswer(const HttpRequest&)> answer_;
  std::list<Connection> connections_;  // in the order in which they came
  Clock::time_point accept_again_{}, second_begins_{};
  int accepted_ = 0;  // since then
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

}  // namespace lockstep::trainer
