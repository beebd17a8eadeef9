// Included after a kernel: what Python calls. HOST_KERNEL and HOST_PARAMS are its name and struct.
#pragma once

// Returns how many bytes were copied to shared memory asynchronously.
extern "C" long run(unsigned blocks, int threads, unsigned cluster, const void* params) {
  const auto& given = *static_cast<const cuflash::HOST_PARAMS*>(params);
  host::copied_bytes = 0;
  host::run(blocks, threads, cluster, [&] { HOST_KERNEL(given); });
  return host::copied_bytes;
}
