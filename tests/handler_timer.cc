// A custom call that calls another one and records how long each call took. For test_host_time.py.
#include <chrono>

using Handler = void* (*)(void* frame);

static Handler timed;
static double seconds[1 << 16];
static int calls;

extern "C" {

void handler_timer_of(Handler handler) { timed = handler, calls = 0; }

void* handler_timer(void* frame) {
  const auto start = std::chrono::steady_clock::now();
  void* error = timed(frame);
  const auto stop = std::chrono::steady_clock::now();
  seconds[calls++ % (1 << 16)] = std::chrono::duration<double>(stop - start).count();
  return error;
}

int handler_timer_calls() { return calls; }

const double* handler_timer_seconds() { return seconds; }

}  // extern "C"
