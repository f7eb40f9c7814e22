// Memory of tensors that is free, joined with what is free beside it, and that of those in use.
//
//     taken -> freed: the list -> the next tensor of just this size
//                              -> joined with its neighbours -> the range that fits best is cut
//
// (Knuth, The Art of Computer Programming 1, section 2.5: dynamic storage allocation.) How new
// memory is made, and what goes back to the system, is page_pool.py's to say. No lock of Python is
// needed here, and no interrupt comes within.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t HUGE_PAGE_NBYTES = 2 << 20;
constexpr size_t MOST_RETURNED = 64;  // Each tensor looks through them all.
const size_t PAGE_NBYTES = sysconf(_SC_PAGESIZE);

// Memory of one mapping or one move, so that it may move on by one. Neighbours of the same mapping
// are one piece.
struct Piece {
  size_t address, nbytes, mapping;
  size_t end() const { return address + nbytes; }
};

// Memory in a row.
struct Block {
  std::vector<Piece> pieces;
  bool is_large = false;  // It is, or was, part of a mapping that may have huge pages.

  size_t address() const { return pieces.front().address; }
  size_t end() const { return pieces.back().end(); }
  size_t nbytes() const { return end() - address(); }

  // Cut off what lies from `cut` on; both parts have some.
  Block split(size_t cut) {
    const auto ends_behind = [cut](const Piece& piece) { return piece.end() > cut; };
    auto at = std::find_if(pieces.begin(), pieces.end(), ends_behind);
    Block rest{{}, is_large};
    if (at->address < cut) {
      rest.pieces.push_back({cut, at->end() - cut, at->mapping});
      at->nbytes = cut - at->address;
      ++at;
    }
    rest.pieces.insert(rest.pieces.end(), at, pieces.end());
    pieces.erase(at, pieces.end());
    return rest;
  }

  // Join with the neighbour behind; a piece that was split is whole again.
  void append(const Block& behind) {
    auto first = behind.pieces.begin();
    if (pieces.back().mapping == first->mapping) pieces.back().nbytes += (first++)->nbytes;
    pieces.insert(pieces.end(), first, behind.pieces.end());
  }
};

// Whole huge pages come from the start, other sizes from the end: so most ranges begin with one.
size_t place_in(size_t start, size_t end, size_t nbytes) {
  return nbytes % HUGE_PAGE_NBYTES ? end - nbytes : start;
}

// Free ranges no two of which are neighbours.
class FreeRanges {
 public:
  explicit FreeRanges(size_t unit) : unit_(unit) {}

  size_t nbytes() const { return nbytes_; }

  void add(Block block) {
    auto behind = by_start_.lower_bound(block.address());
    if (behind != by_start_.begin()) {
      auto before = std::prev(behind);
      if (before->second.end() == block.address()) {
        Block joined = remove(before);
        joined.append(block);
        block = std::move(joined);
      }
    }
    if (behind != by_start_.end() && behind->first == block.end()) block.append(remove(behind));
    insert(std::move(block));
  }

  // `nbytes` of the smallest range that has so many.
  std::optional<Block> take(size_t nbytes) {
    const auto fits = sizes_.lower_bound({nbytes, 0});
    if (fits == sizes_.end()) return std::nullopt;
    const size_t start = fits->second;
    return cut_out(start, place_in(start, start + fits->first, nbytes), nbytes);
  }

  // The same, of one piece.
  std::optional<Block> take_piece(size_t nbytes) {
    for (auto fits = sizes_.lower_bound({nbytes, 0}); fits != sizes_.end(); ++fits) {
      for (const Piece& piece : by_start_.at(fits->second).pieces) {
        if (piece.nbytes >= nbytes) {
          return cut_out(fits->second, place_in(piece.address, piece.end(), nbytes), nbytes);
        }
      }
    }
    return std::nullopt;
  }

  // The end of a range, `nbytes` or a little more; the largest range if all are smaller, of which
  // there has to be one. What is left is whole units, as far as possible.
  Block cut_off(size_t nbytes) {
    auto fits = sizes_.lower_bound({nbytes, 0});
    if (fits == sizes_.end()) --fits;
    const size_t start = fits->second, end = start + fits->first;
    const size_t cut = nbytes < fits->first ? (end - nbytes) / unit_ * unit_ : start;
    const size_t address = std::max(start, cut);
    return cut_out(start, address, end - address);
  }

  // Whole huge pages of `nbytes`, or as many as there are, the smallest ranges' first.
  std::vector<Piece> take_huge(size_t nbytes) {
    std::vector<Piece> found;
    const std::vector<std::pair<size_t, size_t>> all(sizes_.begin(), sizes_.end());
    for (const auto& [size, start] : all) {
      if (nbytes && size >= HUGE_PAGE_NBYTES) nbytes -= take_huge_of(start, nbytes, &found);
    }
    return found;
  }

 private:
  using ByStart = std::map<size_t, Block>;

  Block cut_out(size_t start, size_t address, size_t nbytes) {
    Block found = remove(by_start_.find(start));
    if (address > start) {
      Block rest = found.split(address);
      insert(std::move(found));
      found = std::move(rest);
    }
    if (found.nbytes() > nbytes) insert(found.split(address + nbytes));
    return found;
  }

  size_t take_huge_of(size_t start, size_t nbytes, std::vector<Piece>* found) {
    const Block block = remove(by_start_.find(start));
    Block rest{{}, block.is_large};
    size_t taken = 0;
    for (const Piece& piece : block.pieces) {
      const size_t first = (piece.address + HUGE_PAGE_NBYTES - 1) / HUGE_PAGE_NBYTES;
      const size_t last = piece.end() / HUGE_PAGE_NBYTES;
      const size_t end = last * HUGE_PAGE_NBYTES;
      const size_t has = last > first ? end - first * HUGE_PAGE_NBYTES : 0;
      const size_t begin = end - std::min(has, nbytes - taken);
      if (begin == end) {
        rest.pieces.push_back(piece);
        continue;
      }
      found->push_back({begin, end - begin, piece.mapping});
      taken += end - begin;
      if (begin > piece.address)
        rest.pieces.push_back({piece.address, begin - piece.address, piece.mapping});
      if (!rest.pieces.empty()) insert(std::move(rest));
      rest = {{}, block.is_large};
      if (piece.end() > end) rest.pieces.push_back({end, piece.end() - end, piece.mapping});
    }
    if (!rest.pieces.empty()) insert(std::move(rest));
    return taken;
  }

  void insert(Block block) {
    const size_t start = block.address(), size = block.nbytes();
    sizes_.insert({size, start});
    nbytes_ += size;
    by_start_.emplace(start, std::move(block));
  }

  Block remove(ByStart::iterator at) {
    Block block = std::move(at->second);
    by_start_.erase(at);
    sizes_.erase({block.nbytes(), block.address()});
    nbytes_ -= block.nbytes();
    return block;
  }

  size_t unit_, nbytes_ = 0;
  ByStart by_start_;
  std::set<std::pair<size_t, size_t>> sizes_;  // (bytes, start)
};

// As page_pool.py reads it.
struct Counts {
  size_t in_use, waiting, most_in_use;
};

struct Pool {
  FreeRanges large{HUGE_PAGE_NBYTES};  // Of mappings that may have huge pages.
  FreeRanges small{PAGE_NBYTES};
  std::vector<Block> returned;
  std::vector<Piece> in_hand;  // What has been cut off last, for Python to read.
  Counts counts{0, 0, 0};
  unsigned term = 0;  // How often it has been closed: it does not want what is from before.

  FreeRanges& ranges(bool is_large) { return is_large ? large : small; }

  void join() {
    for (Block& block : returned) ranges(block.is_large).add(std::move(block));
    returned.clear();
  }

  // A block that has been freed, the last one of just this size: it is the warmest.
  std::optional<Block> reuse(size_t nbytes) {
    for (auto at = returned.rbegin(); at != returned.rend(); ++at) {
      if (at->nbytes() == nbytes) {
        Block block = std::move(*at);
        returned.erase(std::next(at).base());
        return block;
      }
    }
    return std::nullopt;
  }

  std::optional<Block> fit(size_t nbytes) {
    std::optional<Block> found;
    if (nbytes < HUGE_PAGE_NBYTES) found = small.take(nbytes);
    return found ? std::move(found) : large.take(nbytes);
  }

  const Piece* hand_over(size_t* count) {
    for (const Piece& piece : in_hand) counts.waiting -= piece.nbytes;
    *count = in_hand.size();
    return in_hand.data();
  }

  // What is in use is not this pool's any more: it is unmapped when it is freed.
  void forget_taken() {
    ++term;
    counts.in_use = counts.most_in_use = 0;
  }

  std::optional<Block> find(size_t nbytes) {
    std::optional<Block> found = reuse(nbytes);
    if (!found) found = fit(nbytes);
    if (!found && !returned.empty()) {  // not earlier: alone a block can serve its own size again
      join();
      found = fit(nbytes);
    }
    return found;
  }
};

struct Loan {
  Block block;
  Pool* pool;
  unsigned term;
};

// Never destroyed: tensors may be freed when the process ends.
std::mutex& guard = *new std::mutex;
std::unordered_map<size_t, Loan>& taken = *new std::unordered_map<size_t, Loan>;
std::vector<Pool*>& pools = *new std::vector<Pool*>;

// Where the process has too many mappings, the addresses alone are kept.
void unmap(void* address, size_t nbytes) {
  if (munmap(address, nbytes)) madvise(address, nbytes, MADV_DONTNEED);
}

}  // namespace

extern "C" {

// A pool for blocks of whole pages. It is never deleted: its blocks may outlive who uses it.
Pool* new_pool() {
  const std::lock_guard<std::mutex> lock(guard);
  pools.push_back(new Pool);
  return pools.back();
}

// Where what a pool has is counted. What is freed waits, whether or not it has been joined.
const Counts* counts_of(const Pool* pool) { return &pool->counts; }

// Address of a block that is free; 0 if none is so large.
size_t take_block(Pool* pool, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(guard);
  std::optional<Block> found = pool->find(nbytes);
  if (!found) return 0;
  Counts& counts = pool->counts;
  counts.waiting -= nbytes;
  counts.in_use += nbytes;
  counts.most_in_use = std::max(counts.most_in_use, counts.in_use);
  const size_t address = found->address();
  taken[address] = {std::move(*found), pool, pool->term};
  return address;
}

// The block there is free; false if it is of no pool. Of a pool that has been closed meanwhile it
// is unmapped.
bool free_block(size_t address) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = taken.find(address);
  if (found == taken.end()) return false;
  Loan loan = std::move(found->second);
  taken.erase(found);
  const size_t nbytes = loan.block.nbytes();
  if (loan.term != loan.pool->term) {
    unmap(reinterpret_cast<void*>(address), nbytes);
    return true;
  }
  loan.pool->counts.in_use -= nbytes;
  loan.pool->counts.waiting += nbytes;
  loan.pool->returned.push_back(std::move(loan.block));
  if (loan.pool->returned.size() > MOST_RETURNED) loan.pool->join();
  return true;
}

// True if the block there is in use, and of this pool.
bool owns_block(const Pool* pool, size_t address) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = taken.find(address);
  return found != taken.end() && found->second.pool == pool && found->second.term == pool->term;
}

// What has been freed is joined with what is free beside it.
void join_free(Pool* pool) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->join();
}

// A new block, of pieces in a row, is as one that was freed: the next tensor of its size has it.
void add_block(Pool* pool, const Piece* pieces, size_t count, bool is_large) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->returned.push_back({std::vector<Piece>(pieces, pieces + count), is_large});
  pool->counts.waiting += pool->returned.back().nbytes();
}

// A piece is free from now on.
void add_piece(Pool* pool, const Piece* piece, bool is_large) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->ranges(is_large).add(Block{{*piece}, is_large});
  pool->counts.waiting += piece->nbytes;
}

// Address of `nbytes` that may move on by one move; 0: there are none. They are the caller's.
size_t take_piece(Pool* pool, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->join();
  std::optional<Block> found;
  if (nbytes < HUGE_PAGE_NBYTES) found = pool->small.take_piece(nbytes);
  if (!found) found = pool->large.take_piece(nbytes);
  if (!found) return 0;
  pool->counts.waiting -= nbytes;
  return found->address();
}

// Whole huge pages of `nbytes`, or as many as there are. They are the caller's; the list of them is
// valid until the next call.
const Piece* take_huge(Pool* pool, size_t nbytes, size_t* count) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->join();
  pool->in_hand = pool->large.take_huge(nbytes);
  return pool->hand_over(count);
}

// The pieces of `nbytes` or a little more, less if no range is so large, none if there is none.
// They are the caller's; the list of them is valid until the next call.
const Piece* cut_off(Pool* pool, size_t nbytes, bool is_large, size_t* count) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->join();
  pool->in_hand.clear();
  FreeRanges& ranges = pool->ranges(is_large);
  if (ranges.nbytes()) pool->in_hand = ranges.cut_off(nbytes).pieces;
  return pool->hand_over(count);
}

// The most that has been in use at once counts so much less from now on.
void lower_most(Pool* pool, size_t nbytes) {
  const std::lock_guard<std::mutex> lock(guard);
  Counts& counts = pool->counts;
  counts.most_in_use -= std::min(nbytes, counts.most_in_use - counts.in_use);
}

// What is in use is the pool's no more.
void forget_taken(Pool* pool) {
  const std::lock_guard<std::mutex> lock(guard);
  pool->forget_taken();
}

}  // extern "C"
