// SPDX-License-Identifier: Apache-2.0
// Pieces of one call's work, shared with the threads that XLA has.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// Runs work(0) to work(count - 1), here and on the pool's other threads.
//
// Whoever is free takes the next piece, and the caller waits for those only
// that another thread has begun: so a pool whose threads all wait in here
// cannot stand still.
inline void share(xla::ffi::ThreadPool& pool, int64_t num_threads,
                  int64_t count, std::function<void(int64_t)> work) {
  if (num_threads < 2 || count < 2) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  struct State {
    std::function<void(int64_t)> work;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> num_done{0};

    void run() {
      for (int64_t i; (i = next.fetch_add(1)) < count;) {
        work(i);
        num_done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  // A thread may come when all is done and the caller gone.
  auto state = std::make_shared<State>();
  state->work = std::move(work);
  state->count = count;
  const int64_t helpers = std::min(num_threads, count) - 1;
  for (int64_t i = 0; i < helpers; i++) {
    pool.Schedule([state] { state->run(); });
  }
  state->run();
  while (state->num_done.load(std::memory_order_acquire) < count) {
    std::this_thread::yield();
  }
}
