#include "launcher/root_cause.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <vector>

namespace lockstep::launcher {
namespace {

using ::testing::HasSubstr;
using How = ExitStatus::How;

const Clock::time_point kStart = Clock::now();

RankReport rank_that(int rank, ExitStatus exit_status, int after_ms, bool stop_requested = false) {
  RankReport report;
  report.rank = rank;
  report.seen = true;
  report.pid = 100 + rank;
  report.host = std::string("a");
  report.exit_status = exit_status;
  report.stop_requested = stop_requested;
  report.ended_at = kStart + Millis(after_ms);
  return report;
}

RankReport lost_rank(int rank, int after_ms, bool stop_requested = false) {
  RankReport report = rank_that(rank, {}, after_ms, stop_requested);
  report.exit_status.reset();
  report.lost = true;
  report.there_at = report.ended_at;
  return report;
}

RootCause find_root_cause_of_ranks(const std::vector<RankReport>& ranks, ExitStatus mpirun = {How::kSignalled, SIGKILL},
                                   bool killed_by_us = true) {
  JobReport job;
  job.ranks = ranks;
  job.started_at = kStart;
  job.mpirun = mpirun;
  job.mpirun_killed_by_us = killed_by_us;
  job.program = std::string("train");
  return find_root_cause(job);
}

TEST(RootCauseTest, AllWell) {
  const auto root_cause = find_root_cause_of_ranks({rank_that(0, {}, 10), rank_that(1, {}, 20)}, {}, false);
  EXPECT_EQ(root_cause.exit_code, 0);
  EXPECT_EQ(root_cause.line, "");
}

TEST(RootCauseTest, KilledByUserOrKernel) {
  RankReport killed = rank_that(1, {How::kSignalled, SIGKILL}, 200);
  const auto line_of = [&] { return find_root_cause_of_ranks({rank_that(0, {}, 300, true), killed}).line; };
  EXPECT_THAT(line_of(),
              HasSubstr("it was ended by SIGKILL, 0.2 s after the start → if nobody killed it, the kernel may"));
  killed.memory_kills = 0;
  EXPECT_THAT(line_of(),
              HasSubstr("→ somebody sent it: the kernel has ended no process of that host for lack of memory"));
  killed.memory_kills = 1;
  EXPECT_THAT(line_of(),
              HasSubstr("ended by SIGKILL, while its host's kernel ended 1 process for lack of memory, 0.2 s"));
  EXPECT_THAT(line_of(), HasSubstr("→ use a smaller batch"));
  killed.exit_status = {How::kSignalled, SIGSEGV};
  EXPECT_THAT(line_of(), testing::EndsWith("it was ended by SIGSEGV, 0.2 s after the start"));
  killed = lost_rank(1, 200);  // and with it the count
  killed.memory_kills = 0;
  EXPECT_THAT(line_of(), HasSubstr("was killed, 0.2 s after the start → if nobody killed it, the kernel may have"));
}

TEST(RootCauseTest, TheEarliestFailureIsTheFirst) {
  const auto root_cause =
      find_root_cause_of_ranks({rank_that(0, {How::kExited, 5}, 300), rank_that(1, {How::kExited, 3}, 200),
                                rank_that(2, {How::kExited, 0}, 100)});
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.exit_code, 3);
  EXPECT_EQ(root_cause.line,
            "rank 1 of 3 (host a, pid 101) failed first: it exited with code 3, 0.2 s after the start");
  EXPECT_FALSE(root_cause.show_mpirun);
}

TEST(RootCauseTest, SignalledRankIsNotRootCause) {
  const auto root_cause = find_root_cause_of_ranks(
      {rank_that(0, {How::kSignalled, SIGTERM}, 100, true), rank_that(1, {How::kSignalled, SIGSEGV}, 150)});
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.exit_code, 128 + SIGSEGV);
  EXPECT_THAT(root_cause.line, HasSubstr("SIGSEGV"));
}

TEST(RootCauseTest, IfAllWereSignalledTheEarliestIsNamedWithMpirunsOutput) {
  const auto root_cause = find_root_cause_of_ranks(
      {rank_that(0, {How::kExited, 1}, 200, true), rank_that(1, {How::kSignalled, SIGTERM}, 100, true)});
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.exit_code, 128 + SIGTERM);
  EXPECT_TRUE(root_cause.show_mpirun);
}

TEST(RootCauseTest, ADeathBySignalBeatsAPeersComplaintWithinSchedulingDelay) {
  const ExitStatus killed = {How::kSignalled, SIGKILL};
  for (const int complaint : {1, 4, 5}) {
    EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, complaint}, 100), rank_that(1, killed, 110)}).rank,
              1);
    EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, complaint}, 100), rank_that(1, killed, 300)}).rank,
              1);
    EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, complaint}, 100), lost_rank(1, 110)}).rank, 1);
    EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, complaint}, 100), rank_that(1, killed, 400)}).rank,
              0);
    EXPECT_EQ(
        find_root_cause_of_ranks({rank_that(0, {How::kExited, complaint}, 100), rank_that(1, killed, 110, true)}).rank,
        0);
  }
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 3}, 100), rank_that(1, killed, 110)}).rank, 0);
  // A peer's abort may be what others' ends have led to.
  const ExitStatus aborted = {How::kSignalled, SIGABRT};
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 4}, 100), rank_that(1, aborted, 110)}).rank, 1);
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 4}, 100), rank_that(1, aborted, 200)}).rank, 0);
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 1}, 100), rank_that(1, aborted, 110)}).rank, 0);
}

TEST(RootCauseTest, ALostWrapperIsTheCauseHoweverLateALauncherThatWasStoppedNoticesIt) {
  RankReport lost = lost_rank(1, 900);
  lost.there_at = kStart + Millis(50);
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 4}, 100), lost}).rank, 1);
  lost.there_at = kStart + Millis(600);
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 4}, 100), lost}).rank, 0);
}

TEST(RootCauseTest, NamesOfHostsThatAreTooLongForOpenMpi) {
  for (const std::size_t length : {56, 57}) {
    JobReport job;
    job.mpirun = {How::kSignalled, SIGABRT};
    job.host = std::string(length, 'a');
    const std::string line = find_root_cause(job).line;
    EXPECT_THAT(line, HasSubstr("mpirun, which holds the ranks together, was ended by SIGABRT"));
    EXPECT_EQ(line.find("56 characters") != std::string::npos, length > 56) << line;
  }
}

RankReport that_waited(RankReport report, std::vector<int> missing) {
  report.missing = std::move(missing);
  return report;
}

TEST(RootCauseTest, RankNamedByOthersIsTheCause) {
  const ExitStatus timed_out = {How::kExited, 5}, killed = {How::kSignalled, SIGKILL};
  RankReport hung = rank_that(1, killed, 400, true);
  std::vector<RankReport> ranks = {that_waited(rank_that(0, timed_out, 300), {1}), hung, rank_that(2, timed_out, 250)};
  const auto root_cause = find_root_cause_of_ranks(ranks);
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.exit_code, 5);
  EXPECT_THAT(root_cause.line,
              HasSubstr("rank 1 of 3 (host a, pid 101) held up the others: rank 0 waited for it in vain"));
  EXPECT_THAT(root_cause.line, HasSubstr("--timeout-seconds"));
  ranks[1].stopped_by = SIGSTOP;
  EXPECT_THAT(find_root_cause_of_ranks(ranks).line, HasSubstr("it was stopped by SIGSTOP"));
  // It was resumed when the job was ended, and says that it has waited for those who had waited for it.
  ranks[1] = that_waited(rank_that(1, timed_out, 310), {0, 2});
  ranks[1].stopped_by = SIGSTOP;
  EXPECT_EQ(find_root_cause_of_ranks(ranks).rank, 1);
  EXPECT_THAT(find_root_cause_of_ranks(ranks).line, HasSubstr("held up the others: rank 0 waited for it in vain"));
  ranks[1].ended_at = ranks[2].ended_at - Millis(10);  // even if it ends first
  EXPECT_THAT(find_root_cause_of_ranks(ranks).line, HasSubstr("rank 1 of 3 (host a, pid 101) held up the others"));
  // It came back too late, and found the others gone.
  ranks[1] = rank_that(1, {How::kExited, 4}, 320);
  EXPECT_THAT(find_root_cause_of_ranks(ranks).line, HasSubstr("rank 1 of 3 (host a, pid 101) held up the others"));
  // It failed for a reason of its own, or died, however late that was noticed.
  for (const ExitStatus exit_status : {ExitStatus{How::kExited, 3}, ExitStatus{How::kSignalled, SIGSEGV}}) {
    ranks[1] = rank_that(1, exit_status, 380);
    EXPECT_EQ(find_root_cause_of_ranks(ranks).rank, 1);
    EXPECT_EQ(find_root_cause_of_ranks(ranks).exit_code, exit_status.exit_code());
    EXPECT_THAT(find_root_cause_of_ranks(ranks).line, HasSubstr("rank 1 of 3 (host a, pid 101) failed first"));
  }
}

// A connection is closed before the process ends: who sees that may be the first to have ended.
TEST(RootCauseTest, RankSeenEndingByOthersFailedFirst) {
  for (const int code : {3, 4}) {
    const auto root_cause = find_root_cause_of_ranks(
        {that_waited(rank_that(0, {How::kExited, 4}, 300), {1}), rank_that(1, {How::kExited, code}, 350)});
    EXPECT_EQ(root_cause.rank, 1);
    EXPECT_EQ(root_cause.exit_code, code);
    EXPECT_THAT(root_cause.line, HasSubstr("rank 1 of 2 (host a, pid 101) failed first"));
  }
}

TEST(RootCauseTest, ChainsOfWaitingRanksEndAtTheRankThatDoesNotWait) {
  const ExitStatus timed_out = {How::kExited, 5}, killed = {How::kSignalled, SIGKILL};
  const auto chain =
      find_root_cause_of_ranks({that_waited(rank_that(0, timed_out, 300), {1, 2}),
                                that_waited(rank_that(1, timed_out, 310), {2}), rank_that(2, killed, 400, true)});
  EXPECT_EQ(chain.rank, 2);
  const auto long_chain =
      find_root_cause_of_ranks({that_waited(rank_that(0, timed_out, 300), {1}),
                                that_waited(rank_that(1, killed, 310, true), {2}), rank_that(2, killed, 400, true)});
  EXPECT_EQ(long_chain.rank, 2);
  EXPECT_THAT(long_chain.line, HasSubstr("rank 1 waited for it in vain"));
  // A link between them is down: nobody is to blame, so the first one is named.
  const auto circle = find_root_cause_of_ranks(
      {that_waited(rank_that(0, timed_out, 300), {1}), that_waited(rank_that(1, timed_out, 290), {0})});
  EXPECT_EQ(circle.rank, 1);
  EXPECT_THAT(circle.line, HasSubstr("failed first"));
  // Names are believed of those alone whose code blames others.
  EXPECT_EQ(find_root_cause_of_ranks(
                {that_waited(rank_that(0, {How::kExited, 3}, 300), {1}), rank_that(1, killed, 400, true)})
                .rank,
            0);
}

TEST(RootCauseTest, ShownUsageErrorIsNotRepeated) {
  std::vector<RankReport> ranks = {rank_that(0, {How::kExited, 2}, 30), rank_that(1, {How::kExited, 2}, 20)};
  EXPECT_NE(find_root_cause_of_ranks(ranks).line, "");
  ranks[0].had_usage_error = true;
  EXPECT_EQ(find_root_cause_of_ranks(ranks).line, "");
  EXPECT_EQ(find_root_cause_of_ranks(ranks).exit_code, 2);
}

TEST(RootCauseTest, AReaderThatHasGone) {
  const std::vector<RankReport> ranks = {rank_that(0, {How::kExited, 75}, 30, true)};
  JobReport job;
  job.ranks = ranks;
  job.interrupted_by = SIGPIPE;
  EXPECT_EQ(find_root_cause(job).exit_code, 128 + SIGPIPE);
  EXPECT_THAT(find_root_cause(job).line, HasSubstr("nobody reads standard output"));
  EXPECT_THAT(find_root_cause(job).line, HasSubstr("a checkpoint was saved"));
}

TEST(RootCauseTest, ALostWrapper) {
  const auto root_cause =
      find_root_cause_of_ranks({rank_that(0, {How::kSignalled, SIGTERM}, 200, true), lost_rank(1, 100)});
  EXPECT_EQ(root_cause.rank, 1);
  EXPECT_EQ(root_cause.exit_code, 137);
  EXPECT_THAT(root_cause.line, HasSubstr("wrapper"));
  EXPECT_EQ(find_root_cause_of_ranks({lost_rank(0, 100)}, {How::kExited, 143}, false).exit_code, 143);
}

TEST(RootCauseTest, MpirunKilledByAnother) {
  const auto root_cause =
      find_root_cause_of_ranks({lost_rank(0, 100), lost_rank(1, 101)}, {How::kSignalled, SIGKILL}, false);
  EXPECT_EQ(root_cause.exit_code, 4);
  EXPECT_FALSE(root_cause.rank);
  EXPECT_THAT(root_cause.line, HasSubstr("mpirun"));
  // A rank that had failed before explains more.
  EXPECT_EQ(find_root_cause_of_ranks({lost_rank(0, 100), rank_that(1, {How::kExited, 9}, 50)},
                                     {How::kSignalled, SIGKILL}, false)
                .rank,
            1);
}

TEST(RootCauseTest, MpirunThatDoesNotStart) {
  const auto root_cause = find_root_cause_of_ranks(std::vector<RankReport>(2), {How::kExited, 1}, false);
  EXPECT_EQ(root_cause.exit_code, 4);
  EXPECT_TRUE(root_cause.show_mpirun);
}

TEST(RootCauseTest, AWrapperThatNeverReported) {
  RankReport unseen;
  unseen.rank = 1;
  const auto root_cause = find_root_cause_of_ranks({rank_that(0, {How::kSignalled, SIGTERM}, 200, true), unseen});
  EXPECT_EQ(root_cause.exit_code, 137);
  EXPECT_THAT(root_cause.line, HasSubstr("rank 1 of 2 never started"));
  EXPECT_THAT(find_root_cause_of_ranks(std::vector<RankReport>(2)).line, HasSubstr("never started"));
  // A rank that failed while another was still starting is the cause.
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kExited, 3}, 10), unseen}).rank, 0);
}

TEST(RootCauseTest, ARankThatLeftWithoutFinalize) {
  const auto root_cause =
      find_root_cause_of_ranks({rank_that(0, {}, 100), rank_that(1, {How::kSignalled, SIGTERM}, 200, true)});
  EXPECT_EQ(root_cause.exit_code, 143);
  EXPECT_EQ(root_cause.rank, 0);
  EXPECT_THAT(root_cause.line, HasSubstr("rank 0 of 2"));
  EXPECT_THAT(root_cause.line, HasSubstr("MPI_Finalize"));
  // mpirun sees it, and asks the other to end, before that has seen it, too.
  auto other = that_waited(rank_that(1, {How::kExited, 4}, 200), {0});
  EXPECT_THAT(find_root_cause_of_ranks({rank_that(0, {}, 100), other}).line, HasSubstr("rank 1 waited for it in vain"));
  other.stop_requested = true;
  const auto later = find_root_cause_of_ranks({rank_that(0, {}, 100), other});
  EXPECT_EQ(later.exit_code, 4);
  EXPECT_EQ(later.rank, 0);
  EXPECT_THAT(later.line, HasSubstr("MPI_Finalize"));
}

JobReport job_of(const std::vector<RankReport>& ranks) {
  JobReport job;
  job.ranks = ranks;
  job.started_at = kStart;
  job.mpirun = {How::kSignalled, SIGKILL};
  job.mpirun_killed_by_us = true;
  return job;
}

LostHost lost_host(const char* name, int last_heard_ms, std::vector<int> ranks) {
  LostHost host;
  host.name = name;
  host.last_heard = kStart + Millis(last_heard_ms);
  host.silent = true;
  host.ranks = std::move(ranks);
  return host;
}

TEST(RootCauseTest, ALostHostIsTheCauseOfWhatFailsAfterwards) {
  const std::vector<RankReport> ranks = {rank_that(0, {How::kExited, 4}, 9000),
                                         rank_that(1, {How::kSignalled, SIGABRT}, 3000), lost_rank(2, 2500),
                                         lost_rank(3, 2500)};
  JobReport job = job_of(ranks);
  job.lost_hosts = {lost_host("c", 2600, {}), lost_host("b", 2500, {2, 3})};
  const auto root_cause = find_root_cause(job);
  EXPECT_EQ(root_cause.exit_code, 4);
  EXPECT_FALSE(root_cause.rank);
  EXPECT_THAT(root_cause.line,
              HasSubstr("host b (ranks 2 and 3) was lost: it was last heard from 2.5 s after the start"));
  EXPECT_THAT(root_cause.line, HasSubstr("→"));
}

TEST(RootCauseTest, FailureBeforeAHostLossIsTheCause) {
  const std::vector<RankReport> ranks = {rank_that(0, {How::kExited, 3}, 2000), lost_rank(1, 2500, true)};
  JobReport job = job_of(ranks);
  job.lost_hosts = {lost_host("b", 2500, {1})};
  EXPECT_EQ(find_root_cause(job).rank, 0);
  EXPECT_EQ(find_root_cause(job).exit_code, 3);
}

TEST(RootCauseTest, AConnectionThatEndsSaysWhy) {
  JobReport job = job_of({});
  auto host = lost_host("b", 100, {1, 2, 3});
  host.silent = false;
  host.why = "Connection reset by peer";
  job.lost_hosts = {host};
  EXPECT_THAT(find_root_cause(job).line,
              HasSubstr("host b (ranks 1 to 3) was lost: the connection to it ended 0.1 s after the "
                        "start (Connection reset by peer)"));
}

TEST(RootCauseTest, AnEndedDaemonExplainsLostRanks) {
  const std::vector<RankReport> lost = {rank_that(0, {}, 50, true), lost_rank(1, 100)};
  JobReport job = job_of(lost);
  job.daemon = DaemonEnd{"b", SIGKILL};
  EXPECT_EQ(find_root_cause(job).exit_code, 4);
  EXPECT_EQ(find_root_cause(job).line, "Open MPI's daemon on host b, which holds its ranks, was ended by SIGKILL");
  const std::vector<RankReport> failed = {rank_that(0, {How::kExited, 3}, 50), lost_rank(1, 100)};
  job.ranks = failed;
  EXPECT_EQ(find_root_cause(job).exit_code, 3);
}

TEST(RootCauseTest, MissingPrograms) {
  const auto missing = find_root_cause_of_ranks({rank_that(0, {How::kNotStarted, ENOENT}, 1)});
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_EQ(missing.line,
            "rank 0 of 1 (host a) cannot start train: No such file or directory → check the program's path");
  EXPECT_EQ(find_root_cause_of_ranks({rank_that(0, {How::kNotStarted, EACCES}, 1)}).exit_code, 126);
}

TEST(RootCauseTest, Interrupted) {
  std::vector<RankReport> ranks = {rank_that(0, {How::kExited, 130}, 10, true),
                                   rank_that(1, {How::kExited, 0}, 10, true)};
  JobReport job;
  job.ranks = ranks;
  job.interrupted_by = SIGINT;
  EXPECT_EQ(find_root_cause(job).exit_code, 130);
  EXPECT_EQ(find_root_cause(job).line, "stopped by Ctrl-C");
  job.interrupted_by = SIGTERM;
  EXPECT_EQ(find_root_cause(job).exit_code, 143);
  ranks[0].exit_status = ExitStatus{How::kExited, 75};
  EXPECT_EQ(find_root_cause(job).exit_code, 75);
}

}  // namespace
}  // namespace lockstep::launcher
