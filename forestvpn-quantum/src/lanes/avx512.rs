//! AVX-512: ChaCha20 with one register per state word, Poly1305 with 52-bit multiply-add (IFMA).

use core::arch::x86_64::*;

use super::{BLOCK, BLOCKS, Group, PACKETS, Pass, Stream};

/// Bits of the limbs of a number below 2^130: 44, 44, 42.
const M44: i64 = (1 << 44) - 1;
const M42: i64 = (1 << 42) - 1;

#[target_feature(enable = "avx512f")]
fn load<T: Plain>(from: &T) -> __m512i {
    const { assert!(size_of::<T>() == 64) };
    // SAFETY: `from` is 64 readable bytes without padding (`Plain` and the line above); any alignment will do.
    unsafe { _mm512_loadu_si512(core::ptr::from_ref(from).cast()) }
}

#[target_feature(enable = "avx512f")]
fn store<T: Plain>(to: &mut T, value: __m512i) {
    const { assert!(size_of::<T>() == 64) };
    // SAFETY: `to` is 64 writable bytes that take any value (`Plain` and the line above); any alignment will do.
    unsafe { _mm512_storeu_si512(core::ptr::from_mut(to).cast(), value) }
}

/// Arrays of integers: every pattern of bits is a value, and no bytes lie between them.
trait Plain {}
impl Plain for [u8; 64] {}
impl Plain for [u32; 16] {}
impl Plain for [u64; 8] {}

/// The 64 bytes of `text` from `at` on, which may lie before its start and go beyond its end: zeros there.
#[target_feature(enable = "avx512f,avx512bw")]
fn load_part(text: &[u8], at: isize) -> __m512i {
    // Byte i is at + i of the text: ones for those that are no smaller than 0, and smaller than its length.
    let from = |n: isize| if n < 64 { u64::MAX << n.max(0) } else { 0 };
    let mask = from(at.saturating_neg()) & !from((text.len() as isize).saturating_sub(at));
    // SAFETY: byte i of the mask is set only for 0 <= at + i < text.len(), and bytes without a bit are not
    // touched, nor do they fault. The pointer itself is calculated without a claim to be in bounds.
    unsafe { _mm512_maskz_loadu_epi8(mask, text.as_ptr().wrapping_offset(at).cast()) }
}

// -- ChaCha20 -----------------------------------------------------------------------------------------
//
//     register  0:  word 0 of block 0 | word 0 of block 1 | ... | word 0 of block 15
//     ...
//     register 15:  word 15 of block 0 | ...
//
// A quarter round is then the same on registers as it is in the RFC on words; at the end the square is turned, so
// that each register is a block.

/// Sixteen blocks of key stream.
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
pub(super) fn keystream(key: &[u32; 8], pass: &Pass, stream: &mut Stream) {
    let word = |word: u32| _mm512_set1_epi32(word.cast_signed());
    let [k0, k1, k2, k3, k4, k5, k6, k7] = key.map(word);
    let start = [
        word(0x6170_7865),
        word(0x3320_646e),
        word(0x7962_2d32),
        word(0x6b20_6574),
        k0,
        k1,
        k2,
        k3,
        k4,
        k5,
        k6,
        k7,
        load(&pass.block),
        _mm512_setzero_si512(),
        load(&pass.low),
        load(&pass.high),
    ];
    let mut x = start;
    macro_rules! quarter {
        ($a:literal, $b:literal, $c:literal, $d:literal) => {
            x[$a] = _mm512_add_epi32(x[$a], x[$b]);
            x[$d] = _mm512_rol_epi32::<16>(_mm512_xor_si512(x[$d], x[$a]));
            x[$c] = _mm512_add_epi32(x[$c], x[$d]);
            x[$b] = _mm512_rol_epi32::<12>(_mm512_xor_si512(x[$b], x[$c]));
            x[$a] = _mm512_add_epi32(x[$a], x[$b]);
            x[$d] = _mm512_rol_epi32::<8>(_mm512_xor_si512(x[$d], x[$a]));
            x[$c] = _mm512_add_epi32(x[$c], x[$d]);
            x[$b] = _mm512_rol_epi32::<7>(_mm512_xor_si512(x[$b], x[$c]));
        };
    }
    for _ in 0..10 {
        quarter!(0, 4, 8, 12);
        quarter!(1, 5, 9, 13);
        quarter!(2, 6, 10, 14);
        quarter!(3, 7, 11, 15);
        quarter!(0, 5, 10, 15);
        quarter!(1, 6, 11, 12);
        quarter!(2, 7, 8, 13);
        quarter!(3, 4, 9, 14);
    }
    for (x, start) in x.iter_mut().zip(start) {
        *x = _mm512_add_epi32(*x, start);
    }
    // Of four rows: in quarter j of the result i, the four words of block 4j + i.
    let four = |a, b, c, d| {
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab2, cd2) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab2, cd2),
            _mm512_unpackhi_epi64(ab2, cd2),
        ]
    };
    let q0 = four(x[0], x[1], x[2], x[3]);
    let q1 = four(x[4], x[5], x[6], x[7]);
    let q2 = four(x[8], x[9], x[10], x[11]);
    let q3 = four(x[12], x[13], x[14], x[15]);
    let [s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15] = &mut stream.0;
    let to = [[s0, s4, s8, s12], [s1, s5, s9, s13], [s2, s6, s10, s14], [s3, s7, s11, s15]];
    for ((((to, q0), q1), q2), q3) in to.into_iter().zip(q0).zip(q1).zip(q2).zip(q3) {
        for (to, block) in to.into_iter().zip(turn([q0, q1, q2, q3])) {
            store(to, block);
        }
    }
}

/// Turns a square of 4 x 4 quarters of registers.
#[target_feature(enable = "avx512f")]
fn turn([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // Quarters 0 and 1 of two registers, then 2 and 3.
    let (ab, cd) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0x44>(c, d));
    let (ab2, cd2) = (_mm512_shuffle_i64x2::<0xee>(a, b), _mm512_shuffle_i64x2::<0xee>(c, d));
    [
        _mm512_shuffle_i64x2::<0x88>(ab, cd),
        _mm512_shuffle_i64x2::<0xdd>(ab, cd),
        _mm512_shuffle_i64x2::<0x88>(ab2, cd2),
        _mm512_shuffle_i64x2::<0xdd>(ab2, cd2),
    ]
}

/// Mixes the key stream of each lane with the text that it is for, if its packet's bit in `good` is set.
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
pub(super) fn mix(bytes: &mut [u8], pass: &Pass, stream: &Stream, good: u64) {
    for (packet, at, len, block) in pass.lanes(stream) {
        if good >> packet & 1 == 0 {
            continue;
        }
        let Some(rest) = bytes.get_mut(at..) else { continue };
        let Some(text) = rest.get_mut(..len) else { continue };
        let block = load(block);
        if let Some(text) = text.first_chunk_mut::<BLOCK>() {
            let mixed = _mm512_xor_si512(load(text), block);
            store(text, mixed);
        } else {
            let mixed = _mm512_xor_si512(load_part(text, 0), block);
            // SAFETY: the mask has a bit for each byte of `text`, which are fewer than 64; no others are written.
            unsafe { _mm512_mask_storeu_epi8(text.as_mut_ptr().cast(), (1 << text.len()) - 1, mixed) }
        }
    }
}

// -- Poly1305 -----------------------------------------------------------------------------------------
//
// A number is three registers, limbs of 44, 44 and 42 bits, each with one lane per packet. A step is
//
//     h = (h + c0) r^4 + c1 r^3 + c2 r^2 + c3 r      (mod 2^130 - 5)
//
// so that carries are propagated once in four blocks. IFMA multiplies the low 52 bits of two lanes and adds the low
// or the high 52 bits of the product; the sums of both are kept apart until the carries.

/// Limbs of a number. Between steps: 44 bits, 44 bits and a little, 42 bits.
type Limbs = [__m512i; 3];

/// A power of r, and 20 times its two upper limbs: 2^132 is 20 mod 2^130 - 5, and that is where the third and the
/// fourth limb would be.
#[derive(Clone, Copy)]
struct Power {
    r: Limbs,
    s1: __m512i,
    s2: __m512i,
}

#[target_feature(enable = "avx512f")]
fn times_20(x: __m512i) -> __m512i {
    _mm512_add_epi64(_mm512_slli_epi64::<4>(x), _mm512_slli_epi64::<2>(x))
}

#[target_feature(enable = "avx512f")]
fn power(r: Limbs) -> Power {
    Power { r, s1: times_20(r[1]), s2: times_20(r[2]) }
}

/// Sums of the low and of the high halves of products, by limb.
#[derive(Clone, Copy)]
struct Sums {
    low: Limbs,
    high: Limbs,
}

impl Sums {
    #[target_feature(enable = "avx512f")]
    fn zero() -> Self {
        let zero = _mm512_setzero_si512();
        Self { low: [zero; 3], high: [zero; 3] }
    }

    /// Adds `h * by`. Limbs of h are below 2^46, those of `by` below 2^49: four products of three terms each stay
    /// below 2^56 in `low`, and, shifted by 10 bits, below 2^62 in `high`.
    #[target_feature(enable = "avx512f,avx512ifma")]
    fn add(&mut self, h: Limbs, by: &Power) {
        let Power { r: [r0, r1, r2], s1, s2 } = *by;
        let [h0, h1, h2] = h;
        let terms =
            [[(h0, r0), (h1, s2), (h2, s1)], [(h0, r1), (h1, r0), (h2, s2)], [(h0, r2), (h1, r1), (h2, r0)]];
        for ((low, high), terms) in self.low.iter_mut().zip(&mut self.high).zip(terms) {
            for (a, b) in terms {
                *low = _mm512_madd52lo_epu64(*low, a, b);
                *high = _mm512_madd52hi_epu64(*high, a, b);
            }
        }
    }

    /// Propagates the carries. A high half weighs 2^52: 8 bits above a limb of 44, 10 above the last one of 42;
    /// what leaves the last one comes back into the first, times 5.
    #[target_feature(enable = "avx512f")]
    fn carried(self) -> Limbs {
        let (m44, m42) = (_mm512_set1_epi64(M44), _mm512_set1_epi64(M42));
        let Self { low: [l0, l1, l2], high: [g0, g1, g2] } = self;
        let up = _mm512_add_epi64(_mm512_srli_epi64::<44>(l0), _mm512_slli_epi64::<8>(g0));
        let (h0, l1) = (_mm512_and_si512(l0, m44), _mm512_add_epi64(l1, up));
        let up = _mm512_add_epi64(_mm512_srli_epi64::<44>(l1), _mm512_slli_epi64::<8>(g1));
        let (h1, l2) = (_mm512_and_si512(l1, m44), _mm512_add_epi64(l2, up));
        let up = _mm512_add_epi64(_mm512_srli_epi64::<42>(l2), _mm512_slli_epi64::<10>(g2));
        let h2 = _mm512_and_si512(l2, m42);
        let h0 = _mm512_add_epi64(h0, times_5(up));
        let (up, h0) = (_mm512_srli_epi64::<44>(h0), _mm512_and_si512(h0, m44));
        [h0, _mm512_add_epi64(h1, up), h2]
    }
}

#[target_feature(enable = "avx512f")]
fn times_5(x: __m512i) -> __m512i {
    _mm512_add_epi64(x, _mm512_slli_epi64::<2>(x))
}

#[target_feature(enable = "avx512f,avx512ifma")]
fn multiply(h: Limbs, by: &Power) -> Limbs {
    let mut sums = Sums::zero();
    sums.add(h, by);
    sums.carried()
}

/// The limbs of 128-bit numbers from their low and high words.
#[target_feature(enable = "avx512f")]
fn limbs(low: __m512i, high: __m512i) -> Limbs {
    let m44 = _mm512_set1_epi64(M44);
    let middle = _mm512_or_si512(_mm512_srli_epi64::<44>(low), _mm512_slli_epi64::<20>(high));
    [_mm512_and_si512(low, m44), _mm512_and_si512(middle, m44), _mm512_srli_epi64::<24>(high)]
}

/// Turns eight rows of eight words: word j of all rows.
#[target_feature(enable = "avx512f")]
fn columns(r: [__m512i; 8]) -> [__m512i; 8] {
    let even = |a, b| _mm512_unpacklo_epi64(a, b);
    let odd = |a, b| _mm512_unpackhi_epi64(a, b);
    let [c0, c2, c4, c6] = turn([even(r[0], r[1]), even(r[2], r[3]), even(r[4], r[5]), even(r[6], r[7])]);
    let [c1, c3, c5, c7] = turn([odd(r[0], r[1]), odd(r[2], r[3]), odd(r[4], r[5]), odd(r[6], r[7])]);
    [c0, c1, c2, c3, c4, c5, c6, c7]
}

/// Low and high words of the eight tags.
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
pub(super) fn poly1305(group: &Group<'_>) -> [[u64; PACKETS]; 2] {
    let [r_low, r_high, s_low, s_high] = &group.keys;
    let r = power(limbs(load(r_low), load(r_high)));
    let r2 = power(multiply(r.r, &r));
    let r3 = power(multiply(r2.r, &r));
    let r4 = power(multiply(r2.r, &r2));
    // From r^4 down to r, as the blocks of a step come.
    let mut powers = [r4, r3, r2, r];
    let mut h = [_mm512_setzero_si512(); 3];

    let (steps, padding) = (group.steps(), group.padding());
    let pads = load(&padding.map(|blocks| blocks as u64));
    // Every block has a bit above its 128 bits, but blocks of padding are nothing at all.
    let bit = _mm512_set1_epi64(1 << 40);
    // First come steps in which some packet has not begun, then those that are text for all, then the last one.
    let begun = padding.iter().fold(0, |most, blocks| most.max(blocks.div_ceil(4)));
    let texts = &group.texts;
    let mut step = 0;
    while step < steps {
        // Where in its text packet n is; before the start and behind the end there are zeros.
        let row = |n: usize| load_part(texts[n], step as isize * 64 - padding[n] as isize * 16);
        let mut words = columns([row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]);
        if step + 1 == steps {
            words[7] = load(&group.lengths());
        }
        let bit_of = |k: usize| {
            let number = _mm512_set1_epi64((step * 4 + k) as i64);
            _mm512_maskz_mov_epi64(_mm512_cmple_epu64_mask(pads, number), bit)
        };
        h = four_blocks(h, words, [bit_of(0), bit_of(1), bit_of(2), bit_of(3)], &powers);
        step += 1;
        while step >= begun && step + 1 < steps {
            let at = step * 64;
            let mut rows = [_mm512_setzero_si512(); PACKETS];
            for n in 0..PACKETS {
                let Some(rest) = texts[n].get(at - padding[n] * 16..) else { continue };
                let Some(bytes) = rest.first_chunk::<64>() else { continue };
                rows[n] = load(bytes);
            }
            h = four_blocks(h, columns(rows), [bit; 4], &powers);
            step += 1;
        }
    }
    let tags = finish(h, load(s_low), load(s_high));
    powers = [power([_mm512_setzero_si512(); 3]); 4];
    zeroize::optimization_barrier(&powers);
    tags
}

/// A step, from the words of its blocks and the bits above them.
#[target_feature(enable = "avx512f,avx512ifma")]
fn four_blocks(h: Limbs, words: [__m512i; 8], bits: [__m512i; 4], powers: &[Power; 4]) -> Limbs {
    let [w0, w1, w2, w3, w4, w5, w6, w7] = words;
    let [b0, b1, b2, b3] = bits;
    let [r4, r3, r2, r] = powers;
    let mut sums = Sums::zero();
    // What came before is added last, so that nothing waits for it longer than it must.
    for (low, high, bit, power) in [(w2, w3, b1, r3), (w4, w5, b2, r2), (w6, w7, b3, r)] {
        let [c0, c1, c2] = limbs(low, high);
        sums.add([c0, c1, _mm512_or_si512(c2, bit)], power);
    }
    let [c0, c1, c2] = limbs(w0, w1);
    let [h0, h1, h2] = h;
    let c2 = _mm512_or_si512(c2, b0);
    sums.add([_mm512_add_epi64(h0, c0), _mm512_add_epi64(h1, c1), _mm512_add_epi64(h2, c2)], r4);
    sums.carried()
}

/// The smallest form of h, plus s, modulo 2^128.
#[target_feature(enable = "avx512f")]
fn finish([h0, h1, h2]: Limbs, s_low: __m512i, s_high: __m512i) -> [[u64; PACKETS]; 2] {
    let (m44, m42) = (_mm512_set1_epi64(M44), _mm512_set1_epi64(M42));
    // Only h1 may be over its 44 bits, by little. If that makes h2 pass 42 bits, h1 is small thereafter and has room
    // for what the 5 that come round may make h0 pass on; if not, nothing comes round.
    let h2 = _mm512_add_epi64(h2, _mm512_srli_epi64::<44>(h1));
    let h1 = _mm512_and_si512(h1, m44);
    let h0 = _mm512_add_epi64(h0, times_5(_mm512_srli_epi64::<42>(h2)));
    let h2 = _mm512_and_si512(h2, m42);
    let h1 = _mm512_add_epi64(h1, _mm512_srli_epi64::<44>(h0));
    let h0 = _mm512_and_si512(h0, m44);
    // g = h + 5 - 2^130; where that is not negative, it is the smaller form.
    let g0 = _mm512_add_epi64(h0, _mm512_set1_epi64(5));
    let g1 = _mm512_add_epi64(h1, _mm512_srli_epi64::<44>(g0));
    let g2 = _mm512_add_epi64(h2, _mm512_srli_epi64::<44>(g1));
    let g2 = _mm512_sub_epi64(g2, _mm512_set1_epi64(1 << 42));
    let smaller = _mm512_cmpge_epi64_mask(g2, _mm512_setzero_si512());
    let h0 = _mm512_mask_and_epi64(h0, smaller, g0, m44);
    let h1 = _mm512_mask_and_epi64(h1, smaller, g1, m44);
    let h2 = _mm512_mask_mov_epi64(h2, smaller, g2);
    let low = _mm512_or_si512(h0, _mm512_slli_epi64::<44>(h1));
    let high = _mm512_or_si512(_mm512_srli_epi64::<20>(h1), _mm512_slli_epi64::<24>(h2));
    let low = _mm512_add_epi64(low, s_low);
    let carry = _mm512_cmplt_epu64_mask(low, s_low);
    let high = _mm512_add_epi64(high, s_high);
    let high = _mm512_mask_add_epi64(high, carry, high, _mm512_set1_epi64(1));
    let mut tags = [[0; PACKETS]; 2];
    let [to_low, to_high] = &mut tags;
    store(to_low, low);
    store(to_high, high);
    tags
}

/// [`finish`] of one number.
#[cfg(test)]
#[target_feature(enable = "avx512f,avx512bw,avx512ifma")]
pub(super) fn finish_words(h: [u64; 3], s: u128) -> u128 {
    let all = |word: u64| _mm512_set1_epi64(word.cast_signed());
    let [low, high] = finish([all(h[0]), all(h[1]), all(h[2])], all(s as u64), all((s >> 64) as u64));
    u128::from(high[3]) << 64 | u128::from(low[3])
}

const _: () = assert!(BLOCKS == 16 && PACKETS == 8);
