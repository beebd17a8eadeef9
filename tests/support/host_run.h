// Included after a kernel: what Python calls. HOST_KERNEL and HOST_PARAMS are its name and struct.
#pragma once

extern "C" void run(unsigned blocks, int threads, const void* params) {
  const auto& given = *static_cast<const cuflash::HOST_PARAMS*>(params);
  host::run(blocks, threads, [&] { HOST_KERNEL(given); });
}
