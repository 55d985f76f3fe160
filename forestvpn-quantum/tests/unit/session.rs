//! Both halves of a session at their limits.

use super::*;

const BORN: Instant = Instant::from_nanos(1_000);

fn halves() -> (SealKey, OpenKey) {
    let key = Secret::take(&mut [7; 32]);
    (SealKey::new(&key, 1, true, BORN), OpenKey::new(&key, 1, true, BORN))
}

/// An authentic keepalive with any counter, even one that may not be.
fn sealed(key: &SealKey, counter: u64) -> [u8; DATA_OVERHEAD] {
    let mut out = [0; DATA_OVERHEAD];
    key.seal(counter, &mut out);
    out
}

fn open(key: &mut OpenKey, mut datagram: [u8; DATA_OVERHEAD], now: Instant) -> Result<usize, Discard> {
    let header = DataHeader { receiver: 1, counter: u64::from_le_bytes(wire::array_at(&datagram, 8)) };
    key.open(header, &mut datagram[DATA_HEADER..], None, now)
}

/// A mistake in one packet's place must not let the others go out as plaintext.
#[test]
fn a_train_with_a_packet_out_of_place_still_seals_the_others() {
    let key = TrainKey::new(&Secret::take(&mut [7; 32]), true);
    let mut bytes = vec![5; 8 * 64];
    let mut jobs: Vec<_> = (0..8).map(|n| Job { at: n * 64, len: 64 - TAG, counter: n as u64 }).collect();
    jobs[3].len = 10_000;
    key.seal_all(&mut bytes, &mut jobs.clone());
    for (n, job) in jobs.iter().enumerate() {
        let packet = &mut bytes[n * 64..][..64];
        let opened = key.open(job.counter, packet);
        assert_eq!(opened, (n != 3).then_some(64 - TAG), "packet {n}");
    }
}

//@test C-SES-5
#[test]
fn no_counter_at_or_above_the_limit_is_handed_out() {
    let (seal, _) = halves();
    seal.set_sent(REJECT_AFTER_MESSAGES - 3);
    assert_eq!(seal.reserve(4, BORN), None, "all of a train or nothing");
    assert_eq!(seal.reserve(2, BORN), Some(REJECT_AFTER_MESSAGES - 3));
    assert_eq!(seal.reserve(1, BORN), Some(REJECT_AFTER_MESSAGES - 1));
    assert_eq!(seal.reserve(1, BORN), None);
    seal.set_sent(u64::MAX);
    assert_eq!(seal.reserve(1, BORN), None, "no wrap");
}

//@test C-SES-5
#[test]
fn no_counter_is_handed_out_after_180_s_nor_refused_a_nanosecond_before() {
    let (seal, _) = halves();
    let end = BORN.after(Duration::from_secs(180));
    assert_eq!(seal.reserve(1, end.before(Duration::from_nanos(1))), Some(0));
    assert_eq!(seal.reserve(1, end), None);
}

//@test C-SES-5
#[test]
fn threads_never_get_the_same_counter() {
    let (seal, _) = halves();
    let mut all: Vec<u64> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..4)
            .map(|_| s.spawn(|| (0..5_000).filter_map(|_| seal.reserve(3, BORN)).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    all.sort_unstable();
    assert!(all.iter().zip(0..).all(|(first, i)| *first == 3 * i));
    assert_eq!((all.len(), seal.sent()), (20_000, 60_000));
}

//@test C-SES-6
//@test C-RPL-3
#[test]
fn an_authentic_packet_with_a_counter_at_the_limit_is_refused() {
    let (seal, mut key) = halves();
    for counter in [REJECT_AFTER_MESSAGES, REJECT_AFTER_MESSAGES + 1, u64::MAX] {
        assert_eq!(open(&mut key, sealed(&seal, counter), BORN), Err(Discard::KeyExpired));
    }
    for counter in [REJECT_AFTER_MESSAGES - 1, REJECT_AFTER_MESSAGES - 2, REJECT_AFTER_MESSAGES - 8129] {
        assert_eq!(open(&mut key, sealed(&seal, counter), BORN), Ok(0));
        assert_eq!(open(&mut key, sealed(&seal, counter), BORN), Err(Discard::Replayed));
    }
    assert_eq!(open(&mut key, sealed(&seal, REJECT_AFTER_MESSAGES - 8130), BORN), Err(Discard::Replayed));
}

//@test C-SES-6
#[test]
fn an_authentic_packet_is_refused_once_the_key_is_180_s_old() {
    let (seal, mut key) = halves();
    let end = BORN.after(Duration::from_secs(180));
    assert_eq!(open(&mut key, sealed(&seal, 0), end.before(Duration::from_nanos(1))), Ok(0));
    assert_eq!(open(&mut key, sealed(&seal, 1), end), Err(Discard::KeyExpired));
}

/// Trains of any sizes and of two keys, as several reads bring them.
#[cfg(feature = "io")]
#[test]
fn what_waits_to_be_sealed_is_sealed_as_datagrams_are_one_by_one() {
    let mut random = 88_172_645_463_325_252_u64;
    let mut below = |n: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % n as u64) as usize
    };
    for trains in [false, true] {
        let keys: Vec<_> = (1..=2)
            .map(|n| Arc::new(SealKey::new(&Secret::take(&mut [n; 32]), n.into(), trains, BORN)))
            .collect();
        for round in 0..300 {
            let (mut bytes, mut expected, mut places) = (Vec::new(), Vec::new(), Vec::new());
            let (same_size, one_key) = (below(2) == 0, below(3) > 0);
            let size = below(1500);
            for _ in 0..=below(40) {
                let key = &keys[if one_key { 0 } else { below(2) }];
                let stride = DATA_OVERHEAD + if same_size { size } else { below(1500) };
                let (count, last) = (1 + below(3) * below(3) * below(16), DATA_OVERHEAD + below(stride - 31));
                let first = below(1 << 40) as u64;
                let at = bytes.len();
                bytes.extend((0..stride * (count - 1) + last).map(|i| (i % 251) as u8));
                expected.extend_from_slice(&bytes[at..]);
                for (counter, datagram) in (first..).zip(expected[at..].chunks_mut(stride)) {
                    key.seal(counter, datagram);
                }
                places.push((at, stride, Sealing { key, first }));
            }
            let mut unsealed = Unsealed::new();
            for (i, &(at, stride, how)) in places.iter().enumerate() {
                let end = places.get(i + 1).map_or(bytes.len(), |next| next.0);
                unsealed.keep(&mut bytes, at..end, stride, how);
            }
            unsealed.seal(&mut bytes);
            assert!(bytes == expected, "round {round}, {} trains", places.len());
            assert_eq!((unsealed.jobs.len(), unsealed.jobs.capacity()), (0, MOST), "no memory was taken");
        }
        assert!(keys.iter().all(|key| Arc::strong_count(key) == 1), "keys are let go");
    }
}

/// By whichever cipher: single packets, few and many at once.
#[test]
fn a_train_is_sealed_as_its_datagrams_are_one_by_one() {
    let key = || Secret::take(&mut [7; 32]);
    for trains in [false, true] {
        let (seal, single) = (SealKey::new(&key(), 9, trains, BORN), SealKey::new(&key(), 9, false, BORN));
        for (count, len, last) in
            [(1, 64, 64), (2, 0, 0), (7, 48, 16), (45, 1424, 1424), (64, 80, 0), (150, 96, 31)]
        {
            let stride = len + DATA_OVERHEAD;
            let total = stride * (count - 1) + last + DATA_OVERHEAD;
            let mut whole: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
            let mut expected = whole.clone();
            seal.seal_train(77, &mut whole, stride);
            for (counter, datagram) in (77..).zip(expected.chunks_mut(stride)) {
                single.seal(counter, datagram);
            }
            assert!(whole == expected, "{count} of {len} bytes, the last of {last}");
        }
    }
}
