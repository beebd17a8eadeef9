// The threads of one_pass_probe.cu, one after the other on the host.
using S = PART;
using T = TOTAL;

extern "C" void run(
    long threads, const S* const* parts, const S* const* others, T* const* totals) {
  for (long i = 0; i < threads; ++i) {
    const S& a = *parts[i];
    const S& b = *others[i];
    T& total = *totals[i];
    BODY;
  }
}
