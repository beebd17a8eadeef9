// Rotary embedding: how a row is rotated by its position (Su et al. 2021, equation 34).
#pragma once

#include "schedule/scheduler.cuh"

namespace cuflash {

// Which two features rotate together, and their frequency.
struct Pairs {
  const double* frequencies;
  int count;

  CUFLASH_DEVICE int first(int pair) const {
    return Config::rotation == Rotation::neighbours ? 2 * pair : pair;
  }
  CUFLASH_DEVICE int second(int pair) const {
    return Config::rotation == Rotation::neighbours ? 2 * pair + 1 : pair + count;
  }
  CUFLASH_DEVICE double frequency(int pair) const {
    return frequencies != nullptr ? frequencies[pair]
                                  : pow(10000.0, -(static_cast<double>(pair) / count));
  }
};

CUFLASH_DEVICE Element to_element(Real x) {
  if constexpr (sizeof(Element) == 2) {
    return static_cast<Element>(pack<Config::dtype>(x, 0));
  } else {
    return x;
  }
}

// A row of an array with the elements of the kernel.
struct StridedRow {
  Element* data;
  int64_t stride;

  CUFLASH_DEVICE void store(int column, Element x) const { data[column * stride] = x; }
};

// Copies a row of `width` features from one array to another and rotates it. Called by one warp.
// Angles are float64, so that large positions lose no digits.
template <typename Row>
CUFLASH_DEVICE void rotate_row(const Row& to, const Element* from, int64_t from_stride, int width,
                               const Pairs& pairs, double position) {
  const int lane = ptx::thread_index() % 32;
  int num_rotated = 0;
  if constexpr (Config::rotation != Rotation::none) {
    num_rotated = 2 * pairs.count;
    for (int pair = lane; pair < pairs.count; pair += 32) {
      const double angle = position * pairs.frequency(pair);
      const Real cosine = static_cast<Real>(cos(angle)), sine = static_cast<Real>(sin(angle));
      const int first = pairs.first(pair), second = pairs.second(pair);
      const Real a = to_real<Config::dtype>(from[first * from_stride]);
      const Real b = to_real<Config::dtype>(from[second * from_stride]);
      to.store(first, to_element(a * cosine - b * sine));
      to.store(second, to_element(a * sine + b * cosine));
    }
  }
  for (int i = num_rotated + lane; i < width; i += 32) to.store(i, from[i * from_stride]);
}

}  // namespace cuflash
