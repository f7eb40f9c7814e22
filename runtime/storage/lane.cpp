// Moves bytes between memory and one file without Python's lock.
//
//     urgent > what the thread prefers (reads, writes) > the rest -> digest, write | read, digest
//
// A thread of Python that moves chunks needs the lock several times for each, and while it has it
// the thread that computes waits. Threads that `run` here come back to Python only where Python has
// to do something: a job failed, somebody asked for a report, or what has ended has not been
// counted for a while. Whoever waits for a job reads its group, or waits here himself.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds UNCOUNTED_FOR{250};  // Then a thread goes and counts.
constexpr int64_t ENDED_EARLY = -1, CHANGED = -2;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// As lane.py has it; Python reads it whenever it likes.
struct Group {
  std::atomic<int64_t> left, start_ns, end_ns, report;
};

// The same.
struct Job {
  uint64_t number;
  Group* group;
  uint64_t* digest;  // To be set by a write and met by a read; null: not checked.
  char* address;
  uint64_t nbytes;
  int64_t offset;
  int64_t is_write;
};

// The same: a job that has ended, or runs.
struct Report {
  uint64_t number;
  int64_t start_ns, end_ns;
  int64_t error;  // An errno, or one of the negative ones above; 0: all is well.
};

using Write = ssize_t (*)(int, const void*, size_t, off_t);
using Read = ssize_t (*)(int, void*, size_t, off_t);
std::atomic<Write> write_call{pwrite};
std::atomic<Read> read_call{pread};

using Digest = uint64_t (*)(const void*, size_t);

struct Lane {
  int fd;
  Digest digest;
  std::mutex guard;
  std::condition_variable work, urgent_work, ended;
  std::deque<Job> urgent, reads, writes;
  std::vector<std::pair<Job, int64_t>> running;  // And since when.
  std::deque<Report> reports;
  Clock::time_point oldest_report{};
  uint64_t last_number = 0;
  uint64_t num_calls = 0;  // How often Python wanted its threads.
  uint64_t num_ended = 0, num_uncounted = 0;
  bool is_open = true, has_attention = false;

  std::deque<Job>& others(const Job& job) { return job.is_write ? writes : reads; }

  bool take(std::deque<Job>& queue, Job* job) {
    if (queue.empty()) return false;
    *job = queue.front();
    queue.pop_front();
    return true;
  }

  bool take(bool prefers_writes, bool urgent_only, Job* job) {
    if (take(urgent, job)) return true;
    if (urgent_only) return false;
    return take(prefers_writes ? writes : reads, job) || take(prefers_writes ? reads : writes, job);
  }

  template <class Call>
  int64_t move(const std::atomic<Call>& call, const Job& job) {
    for (uint64_t done = 0; done < job.nbytes;) {
      const ssize_t n = call.load()(fd, job.address + done, job.nbytes - done, job.offset + done);
      if (n < 0 && errno != EINTR) return errno;
      if (n == 0) return ENDED_EARLY;
      done += std::max<ssize_t>(n, 0);
    }
    return 0;
  }

  int64_t write(const Job& job) {
    if (job.digest) *job.digest = digest(job.address, job.nbytes);
    return move(write_call, job);
  }

  int64_t read(const Job& job) {
    if (const int64_t error = move(read_call, job)) return error;
    if (job.digest && digest(job.address, job.nbytes) != *job.digest) return CHANGED;
    return 0;
  }

  // Whether Python has to see to it at once.
  bool end(const Job& job, int64_t start_ns, int64_t error) {
    const auto is_it = [&job](const auto& one) { return one.first.number == job.number; };
    running.erase(std::find_if(running.begin(), running.end(), is_it));
    if (reports.empty()) oldest_report = Clock::now();
    reports.push_back({job.number, start_ns, now_ns(), error});
    ++num_uncounted;
    bool is_last = false;
    if (!error) {
      Group& group = *job.group;
      if (!group.start_ns || start_ns < group.start_ns) group.start_ns = start_ns;
      group.end_ns = reports.back().end_ns;
      is_last = --group.left == 0;
    }
    if (is_last) {
      ++num_ended;
      ended.notify_all();
    }
    return error || (is_last && job.group->report);
  }

  void run(uint64_t calls_before, bool prefers_writes, bool urgent_only) {
    std::unique_lock<std::mutex> lock(guard);
    std::condition_variable& wanted = urgent_only ? urgent_work : work;
    Job job;
    while (is_open && num_calls == calls_before) {
      if (has_attention) {
        has_attention = false;
        return;
      }
      if (take(prefers_writes, urgent_only, &job)) {
        const int64_t start_ns = now_ns();
        running.emplace_back(job, start_ns);
        lock.unlock();
        const int64_t error = job.is_write ? write(job) : read(job);
        lock.lock();
        if (end(job, start_ns, error)) return;
      } else if (!reports.empty() && !urgent_only) {
        if (wanted.wait_until(lock, oldest_report + UNCOUNTED_FOR) == std::cv_status::timeout)
          return;
      } else {
        wanted.wait(lock);
      }
      if (!reports.empty() && !urgent_only && Clock::now() > oldest_report + UNCOUNTED_FOR) return;
    }
  }
};

using Lock = std::lock_guard<std::mutex>;

}  // namespace

extern "C" {

Lane* new_lane(int fd, size_t digest) {
  Lane* lane = new Lane;
  lane->fd = fd;
  lane->digest = reinterpret_cast<Digest>(digest);
  return lane;
}

// What writes and reads from now on; null: the system's own. For tests.
void set_calls(Write write, Read read) {
  write_call = write ? write : pwrite;
  read_call = read ? read : pread;
}

// No thread may be in it any more.
void delete_lane(Lane* lane) { delete lane; }

void push_jobs(Lane* lane, const Job* jobs, size_t count, bool is_urgent) {
  const Lock lock(lane->guard);
  for (const Job* job = jobs; job != jobs + count; ++job)
    (is_urgent ? lane->urgent : lane->others(*job)).push_back(*job);
  if (count) lane->last_number = jobs[count - 1].number;
  for (size_t n = 0; n < count; ++n) lane->work.notify_one();
  if (is_urgent) lane->urgent_work.notify_all();
}

// The number of the job that was pushed last.
uint64_t last_number(Lane* lane) {
  const Lock lock(lane->guard);
  return lane->last_number;
}

// What is queued of a group goes before all that is not urgent.
void promote_group(Lane* lane, const Group* group) {
  const Lock lock(lane->guard);
  for (std::deque<Job>* queue : {&lane->reads, &lane->writes}) {
    const auto is_other = [group](const Job& job) { return job.group != group; };
    const auto moved = std::stable_partition(queue->begin(), queue->end(), is_other);
    lane->urgent.insert(lane->urgent.end(), moved, queue->end());
    queue->erase(moved, queue->end());
  }
  lane->urgent_work.notify_all();
}

// Takes what is queued of a group, or of all (null), out again; up to `most` numbers of them.
size_t remove_jobs(Lane* lane, const Group* group, uint64_t* numbers, size_t most) {
  const Lock lock(lane->guard);
  size_t count = 0;
  for (std::deque<Job>* queue : {&lane->urgent, &lane->reads, &lane->writes}) {
    for (auto job = queue->begin(); job != queue->end();) {
      if (count == most || (group && job->group != group)) {
        ++job;
        continue;
      }
      numbers[count++] = job->number;
      job = queue->erase(job);
    }
  }
  return count;
}

// Moves bytes until Python is needed: `num_calls` is not `calls_before`, or see above.
void run_lane(Lane* lane, uint64_t calls_before, bool prefers_writes, bool urgent_only) {
  lane->run(calls_before, prefers_writes, urgent_only);
}

uint64_t num_calls(Lane* lane) {
  const Lock lock(lane->guard);
  return lane->num_calls;
}

// All threads come back to Python once.
void call_back(Lane* lane) {
  const Lock lock(lane->guard);
  ++lane->num_calls;
  lane->work.notify_all();
  lane->urgent_work.notify_all();
}

// A thread comes back when the last job of the group has ended, or now if it has; null: now.
void ask_report(Lane* lane, Group* group) {
  const Lock lock(lane->guard);
  if (group) group->report = 1;
  if (!group || group->left == 0) {
    lane->has_attention = true;
    lane->work.notify_one();
  }
}

// Up to `most` jobs that have ended. They count as uncounted until `count_jobs` says otherwise.
size_t take_reports(Lane* lane, Report* reports, size_t most) {
  const Lock lock(lane->guard);
  const size_t count = std::min(most, lane->reports.size());
  std::copy_n(lane->reports.begin(), count, reports);
  lane->reports.erase(lane->reports.begin(), lane->reports.begin() + count);
  return count;
}

void count_jobs(Lane* lane, size_t count) {
  const Lock lock(lane->guard);
  lane->num_uncounted -= count;
  lane->ended.notify_all();
}

// Up to `most` jobs that are being moved.
size_t running_jobs(Lane* lane, Report* reports, size_t most) {
  const Lock lock(lane->guard);
  size_t count = 0;
  for (const auto& [job, start_ns] : lane->running)
    if (count < most) reports[count++] = {job.number, start_ns, 0, 0};
  return count;
}

size_t num_queued(Lane* lane) {
  const Lock lock(lane->guard);
  return lane->urgent.size() + lane->reads.size() + lane->writes.size();
}

uint64_t num_ended(Lane* lane) {
  const Lock lock(lane->guard);
  return lane->num_ended;
}

uint64_t num_uncounted(Lane* lane) {
  const Lock lock(lane->guard);
  return lane->num_uncounted;
}

// Something else has ended that somebody may wait for here.
void ring_lane(Lane* lane) {
  const Lock lock(lane->guard);
  ++lane->num_ended;
  lane->ended.notify_all();
}

// Waits until something has ended since there were `ended_before`; whether it has, in time.
bool await_end(Lane* lane, uint64_t ended_before, int64_t patience_ns) {
  std::unique_lock<std::mutex> lock(lane->guard);
  return lane->ended.wait_for(lock, std::chrono::nanoseconds(patience_ns),
                              [&] { return lane->num_ended != ended_before; });
}

// Waits until all that has ended is counted; whether it is, in time.
bool await_counted(Lane* lane, int64_t patience_ns) {
  std::unique_lock<std::mutex> lock(lane->guard);
  return lane->ended.wait_for(lock, std::chrono::nanoseconds(patience_ns),
                              [&] { return lane->num_uncounted == 0; });
}

// Threads come back to Python for good.
void stop_lane(Lane* lane) {
  const Lock lock(lane->guard);
  lane->is_open = false;
  lane->work.notify_all();
  lane->urgent_work.notify_all();
  lane->ended.notify_all();
}

}  // extern "C"
