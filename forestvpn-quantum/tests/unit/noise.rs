//! The door, on a clock that the test winds.

use core::net::IpAddr;
use core::time::Duration;
use std::sync::Arc;

use super::rate_limiter::RateLimiter;
use super::*;
use crate::time::{Entropy, Instant, OsEntropy};
use crate::x25519::{PublicKey, StaticSecret};

/// What a call answered, as a value of its own.
#[derive(Clone, Debug, PartialEq)]
enum Out {
    Done,
    Err(WireGuardError),
    Net(Vec<u8>),
    Tun(Vec<u8>, IpAddr),
}

impl From<TunnResult<'_>> for Out {
    fn from(result: TunnResult<'_>) -> Self {
        match result {
            TunnResult::Done => Self::Done,
            TunnResult::Err(e) => Self::Err(e),
            TunnResult::WriteToNetwork(b) => Self::Net(b.to_vec()),
            TunnResult::WriteToTunnelV4(b, ip) => Self::Tun(b.to_vec(), ip.into()),
            TunnResult::WriteToTunnelV6(b, ip) => Self::Tun(b.to_vec(), ip.into()),
        }
    }
}

impl Out {
    fn net(self) -> Vec<u8> {
        let Self::Net(bytes) = self else { panic!("expected a datagram, got {self:?}") };
        bytes
    }

    fn tun(self) -> Vec<u8> {
        let Self::Tun(bytes, _) = self else { panic!("expected a packet, got {self:?}") };
        bytes
    }
}

/// A tunnel's methods with a large buffer, at a time in milliseconds.
struct End(Tunn);

fn at(ms: u64) -> Now {
    Now {
        mono: Instant::from_nanos(1_000_000_000_000).after(Duration::from_millis(ms)),
        unix: Duration::from_secs(1_700_000_000) + Duration::from_millis(ms),
    }
}

fn ms(instant: Instant) -> u64 {
    instant.since(at(0).mono).as_millis() as u64
}

impl End {
    fn encapsulate(&mut self, packet: &[u8], t: u64) -> Out {
        self.0.encapsulate_at(packet, &mut [0xaa; 2048], at(t)).into()
    }
    fn decapsulate(&mut self, datagram: &[u8], t: u64) -> Out {
        self.0.decapsulate_at(Some([192, 0, 2, 1].into()), datagram, &mut [0xaa; 2048], at(t)).into()
    }
    fn tick(&mut self, t: u64) -> Out {
        self.0.update_timers_at(&mut [0xaa; 2048], at(t)).into()
    }
    fn initiation(&mut self, force: bool, t: u64) -> Out {
        self.0.format_handshake_initiation_at(&mut [0xaa; 2048], force, at(t)).into()
    }
    fn deadline(&self) -> Option<u64> {
        self.0.next_timer_update().map(ms)
    }
}

fn secret() -> StaticSecret {
    let mut bytes = [0; 32];
    OsEntropy.fill(&mut bytes);
    bytes.into()
}

fn pair_with(psks: [Option<[u8; 32]>; 2], keepalive: Option<u16>) -> (End, End) {
    let (a, b) = (secret(), secret());
    let (pa, pb) = (PublicKey::from(&a), PublicKey::from(&b));
    let a = Tunn::new_at(a, pb, psks[0], keepalive, 7, None, at(0));
    (End(a), End(Tunn::new_at(b, pa, psks[1], None, 9, None, at(0))))
}

fn pair() -> (End, End) {
    pair_with([None, None], None)
}

/// An IPv4 packet of `len` bytes, at least 20.
fn v4(len: usize) -> Vec<u8> {
    let mut p: Vec<u8> = (0..len).map(|i| i as u8).collect();
    p[0] = 0x45;
    p[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    p[12..16].copy_from_slice(&[10, 0, 0, 1]);
    p[16..20].copy_from_slice(&[10, 0, 0, 2]);
    p
}

/// An IPv6 packet of `len` bytes, at least 40.
fn v6(len: usize) -> Vec<u8> {
    let mut p: Vec<u8> = (0..len).map(|i| i as u8).collect();
    p[0] = 0x60;
    p[4..6].copy_from_slice(&((len - 40) as u16).to_be_bytes());
    p
}

/// A handshake begun by `a` at `t`, confirmed.
fn shake(a: &mut End, b: &mut End, t: u64) {
    let init = a.initiation(true, t).net();
    let resp = b.decapsulate(&init, t).net();
    let confirm = a.decapsulate(&resp, t).net();
    assert_eq!(b.decapsulate(&confirm, t), Out::Done);
}

fn shaken() -> (End, End) {
    let (mut a, mut b) = pair();
    shake(&mut a, &mut b, 0);
    (a, b)
}

/// `packet` from one end to the other.
fn pass(from: &mut End, to: &mut End, packet: &[u8], t: u64) {
    let datagram = from.encapsulate(packet, t).net();
    assert_eq!(to.decapsulate(&datagram, t).tun(), packet);
}

#[test]
fn a_tunnel_may_move_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Tunn>();
    check::<RateLimiter>();
}

// F01
//@test C-OUT-2
#[test]
fn a_datagram_is_32_bytes_and_the_packet_padded_to_16() {
    let (mut a, mut b) = shaken();
    for len in 20..=84 {
        let datagram = a.encapsulate(&v4(len), 1).net();
        assert_eq!(datagram.len(), 32 + len.next_multiple_of(16));
        assert_eq!(b.decapsulate(&datagram, 1), Out::Tun(v4(len), [10, 0, 0, 1].into()));
    }
    assert_eq!(a.encapsulate(&[], 1).net().len(), 32);
}

// Upstream promises `src.len() + 32`; embedders reserve exactly that.
//@test C-OUT-2
#[test]
fn padding_takes_only_the_room_that_there_is() {
    let (mut a, mut b) = shaken();
    let packet = v4(1282);
    for room in 0..=20 {
        let mut dst = vec![0; packet.len() + 32 + room];
        let datagram = Out::from(a.0.encapsulate_at(&packet, &mut dst, at(1))).net();
        assert_eq!(datagram.len(), 32 + (1282 + room).min(1296));
        assert_eq!(b.decapsulate(&datagram, 1).tun(), packet);
    }
    // Nor does it exceed the MTU: a full packet of the usual 1420 stays one datagram of 1500 bytes on the wire.
    assert_eq!(a.encapsulate(&v4(1420), 1).net().len(), 32 + 1420);
    a.0.set_mtu(1412);
    assert_eq!(a.encapsulate(&v4(1411), 1).net().len(), 32 + 1412);
    assert_eq!(a.encapsulate(&v4(1399), 1).net().len(), 32 + 1408);
}

// F53
#[test]
fn ipv6_packets_of_just_a_header_pass() {
    let (mut a, mut b) = shaken();
    for len in [40, 41, 53, 1280] {
        pass(&mut a, &mut b, &v6(len), 1);
        pass(&mut b, &mut a, &v6(len), 1);
    }
}

//@test C-IN-3
//@test C-RPL-4
#[test]
fn what_is_no_ip_packet_inside_is_refused_but_counts_as_received() {
    let (mut a, mut b) = shaken();
    let mut short = v4(20);
    short[3] = 19;
    let mut long = v4(40);
    long[3] = 200;
    let mut wide = v6(40);
    wide[4..6].copy_from_slice(&0xffff_u16.to_be_bytes());
    for bad in [&short[..], &long, &wide, &v4(20)[..16], &v6(40)[..32], &[0x70; 40]] {
        let datagram = a.encapsulate(bad, 1).net();
        assert_eq!(b.decapsulate(&datagram, 1), Out::Err(WireGuardError::InvalidPacket));
        assert_eq!(b.decapsulate(&datagram, 1), Out::Err(WireGuardError::DuplicateCounter));
    }
}

#[test]
fn indices_are_the_callers_number_and_a_count() {
    let (mut a, mut b) = pair();
    let mut seen = Vec::new();
    for round in 0..600 {
        // Below ten a second, which would be load.
        let t = round * 110;
        let init = a.initiation(true, t).net();
        assert_eq!((init[5], init[6], init[7]), (7, 0, 0));
        let resp = b.decapsulate(&init, t).net();
        assert_eq!(resp[5], 9);
        let Ok(Packet::HandshakeResponse(p)) = Tunn::parse_incoming_packet(&resp) else { panic!() };
        assert_eq!(p.receiver_idx >> 8, 7);
        // Unconfirmed sessions pile up on one side, current ones on the other: no index may be taken twice.
        if round % 300 == 0 {
            let confirm = a.decapsulate(&resp, t).net();
            assert_eq!(b.decapsulate(&confirm, t), Out::Done);
            seen.push((init[4], resp[4]));
        }
        let last = seen.last().unwrap();
        assert!(round % 300 == 0 || (init[4] != last.0 && resp[4] != last.1));
    }
    pass(&mut a, &mut b, &v4(60), 67_000);
    pass(&mut b, &mut a, &v4(60), 67_000);
}

// F166
#[test]
fn a_short_buffer_is_an_error_and_changes_nothing() {
    const SHORT: Out = Out::Err(WireGuardError::DestinationBufferTooSmall);
    let (mut a, mut b) = pair();
    let packet = v4(100);
    for len in 0..148 {
        assert_eq!(Out::from(a.0.encapsulate_at(&packet, &mut vec![0; len], at(0))), SHORT, "{len}");
        assert_eq!(Out::from(a.0.format_handshake_initiation_at(&mut vec![0; len], false, at(0))), SHORT);
    }
    // Nothing waits and no handshake is under way: the first call with room begins one.
    let init = a.encapsulate(&packet, 0).net();
    for len in 0..92 {
        assert_eq!(Out::from(b.0.decapsulate_at(None, &init, &mut vec![0; len], at(0))), SHORT, "{len}");
    }
    let resp = b.decapsulate(&init, 0).net();
    for len in 0..64 {
        assert_eq!(Out::from(a.0.decapsulate_at(None, &resp, &mut vec![0; len], at(0))), SHORT, "{len}");
    }
    let t = 3000;
    // The packet that waits does not fit, a keepalive does: the session is confirmed, the packet goes on waiting.
    let confirm = Out::from(a.0.decapsulate_at(None, &resp, &mut [0; 131], at(t))).net();
    assert_eq!(confirm.len(), 32);
    assert_eq!(Out::from(a.0.decapsulate_at(None, &[], &mut [0; 131], at(t))), SHORT);
    assert_eq!(Out::from(a.0.update_timers_at(&mut [0; 131], at(t))), SHORT);
    let waited = Out::from(a.0.decapsulate_at(None, &[], &mut [0; 132], at(t))).net();
    assert_eq!(b.decapsulate(&confirm, t), Out::Done);
    assert_eq!(b.decapsulate(&waited, t).tun(), packet);

    // With a session: neither is a counter used up nor is a received one marked.
    for len in 0..132 {
        assert_eq!(Out::from(a.0.encapsulate_at(&packet, &mut vec![0; len], at(t))), SHORT, "{len}");
    }
    let datagram = a.encapsulate(&packet, t).net();
    assert_eq!(datagram[8], 2, "the third counter");
    for len in 0..datagram.len() - 16 {
        assert_eq!(Out::from(b.0.decapsulate_at(None, &datagram, &mut vec![0; len], at(t))), SHORT, "{len}");
    }
    let mut exact = vec![0; datagram.len() - 16];
    assert_eq!(Out::from(b.0.decapsulate_at(None, &datagram, &mut exact, at(t))).tun(), packet);

    // A timer that is due stays due: the passive keepalive, 10 s after data.
    for len in 0..148 {
        let tick = Out::from(b.0.update_timers_at(&mut vec![0; len], at(t + 10_001)));
        assert_eq!(tick, SHORT, "{len}");
    }
    assert_eq!(b.tick(t + 10_001).net().len(), 32);
}

// F166
#[test]
fn a_buffer_too_short_for_the_packet_that_waits_neither_queues_another_nor_stops_a_timer() {
    const SHORT: Out = Out::Err(WireGuardError::DestinationBufferTooSmall);
    let (mut a, mut b) = pair_with([None, None], Some(3));
    let init = a.encapsulate(&v4(300), 0).net();
    let resp = b.decapsulate(&init, 0).net();
    let confirm = Out::from(a.0.decapsulate_at(None, &resp, &mut [0; 200], at(0))).net();
    assert_eq!(b.decapsulate(&confirm, 0), Out::Done);
    assert_eq!(Out::from(a.0.encapsulate_at(&v4(60), &mut [0; 200], at(1))), SHORT);
    // The persistent keepalive is due.
    assert_eq!(Out::from(a.0.update_timers_at(&mut [0; 200], at(3000))), SHORT);
    let waited = a.tick(3000).net();
    assert_eq!(b.decapsulate(&waited, 3000).tun(), v4(300));
    assert_eq!(a.tick(3000), Out::Done, "nothing else was queued, and the packet was sign of life enough");
    assert_eq!(a.tick(6000).net().len(), 32);
}

// F174
#[test]
fn every_kind_of_refusal_has_its_own_error_and_none_disturbs_the_session() {
    use WireGuardError::*;
    let (mut a, mut b) = pair();
    let (mut other, _) = pair();
    let err = |e| Out::Err(e);
    let old_init = a.initiation(true, 0).net();
    let init = a.initiation(true, 100).net();

    // Before there is a session.
    let mut early = vec![4, 0, 0, 0, 0, 9, 0, 0];
    early.resize(48, 0);
    assert_eq!(b.decapsulate(&early, 100), err(NoCurrentSession));
    assert_eq!(b.decapsulate(&other.initiation(true, 0).net(), 100), err(InvalidMac));

    let resp = b.decapsulate(&init, 100).net();
    assert_eq!(b.decapsulate(&init, 200), err(WrongTai64nTimestamp), "replayed");
    assert_eq!(b.decapsulate(&old_init, 200), err(WrongTai64nTimestamp), "late");
    let mut wrong = resp.clone();
    wrong[8] ^= 1;
    resign(&mut wrong, &a.0.local.public.0);
    assert_eq!(a.decapsulate(&wrong, 200), err(WrongIndex));
    let mut forged = resp.clone();
    forged[50] ^= 1;
    assert_eq!(a.decapsulate(&forged, 200), err(InvalidMac));
    resign(&mut forged, &a.0.local.public.0);
    assert_eq!(a.decapsulate(&forged, 200), err(InvalidAeadTag));
    let confirm = a.decapsulate(&resp, 200).net();
    assert_eq!(b.decapsulate(&confirm, 200), Out::Done);
    assert_eq!(a.decapsulate(&resp, 300), err(UnexpectedPacket), "answered already");

    // Data.
    let first = a.encapsulate(&v4(60), 300).net();
    assert!(matches!(b.decapsulate(&first, 300), Out::Tun(..)));
    assert_eq!(b.decapsulate(&first, 300), err(DuplicateCounter));
    let mut bad = a.encapsulate(&v4(60), 300).net();
    let good = bad.clone();
    bad[20] ^= 1;
    assert_eq!(b.decapsulate(&bad, 300), err(InvalidAeadTag));
    let mut unknown = good.clone();
    unknown[4] ^= 0x55;
    assert_eq!(b.decapsulate(&unknown, 300), err(WrongIndex));
    for noise in
        [&good[..31], &good[1..], &[0; 64], &[1], &[4, 0, 0, 1, 0, 0, 0, 0], &[&good[..], &good].concat()]
    {
        let refused = b.decapsulate(noise, 300);
        assert!(matches!(refused, Out::Err(InvalidPacket | InvalidAeadTag)), "{refused:?}");
    }
    assert!(matches!(b.decapsulate(&good, 300), Out::Tun(..)), "the true one is still good");
    for _ in 0..8200 {
        b.decapsulate(&a.encapsulate(&[], 300).net(), 300);
    }
    assert_eq!(b.decapsulate(&first, 300), err(InvalidCounter), "older than the window");
    let mut beyond = first.clone();
    beyond[8..16].fill(0xff);
    assert_eq!(b.decapsulate(&beyond, 300), err(InvalidCounter), "no such counter");
    assert_eq!(b.decapsulate(&first, 300_000), err(NoCurrentSession), "the keys are too old");

    pass(&mut a, &mut b, &v4(60), 400);
    pass(&mut b, &mut a, &v4(60), 400);
}

/// Makes mac1 right again, as only somebody who knows the receiver's public key can.
fn resign(message: &mut [u8], receiver: &[u8; 32]) {
    let at = message.len() - 32;
    let key = crate::crypto::hash(&[b"mac1----", receiver]);
    let mac1 = crate::crypto::mac(&key, &[&message[..at]]);
    message[at..at + 16].copy_from_slice(&mac1);
}

// F174: an initiation that is for us, but not from the peer.
#[test]
fn an_initiation_from_another_key_is_told_apart_and_its_sender_can_be_asked_for() {
    let (b, stranger) = (secret(), secret());
    let pb = PublicKey::from(&b);
    let mut end = End(Tunn::new_at(b.clone(), PublicKey::from(&secret()), None, None, 1, None, at(0)));
    let name = PublicKey::from(&stranger);
    let mut other = End(Tunn::new_at(stranger, pb, None, None, 2, None, at(0)));
    let init = other.initiation(true, 0).net();
    assert_eq!(end.decapsulate(&init, 0), Out::Err(WireGuardError::WrongKey));

    let Ok(Packet::HandshakeInit(p)) = Tunn::parse_incoming_packet(&init) else { panic!() };
    let half = handshake::parse_handshake_anon(&b, &pb, &p).unwrap();
    assert_eq!((half.peer_index, half.peer_static_public), (2 << 8, name.to_bytes()));
    let wrong = secret();
    let refused = handshake::parse_handshake_anon(&wrong, &PublicKey::from(&wrong), &p);
    assert_eq!(refused.err(), Some(WireGuardError::InvalidAeadTag));
}

// F175
#[test]
fn encrypting_without_side_effects_is_possible() {
    let (mut a, mut b) = pair();
    let only = |a: &mut End, t| Out::from(a.0.encapsulate_data_at(&v4(60), &mut [0; 2048], at(t)));
    assert_eq!(only(&mut a, 0), Out::Err(WireGuardError::NoCurrentSession));
    assert_eq!((a.deadline(), a.tick(60_000)), (None, Out::Done), "nothing waits, nothing began");
    shake(&mut a, &mut b, 0);
    assert_eq!(a.decapsulate(&[], 0), Out::Done);
    let datagram = only(&mut a, 1).net();
    assert_eq!(b.decapsulate(&datagram, 1).tun(), v4(60));
    assert_eq!(only(&mut a, 180_000), Out::Err(WireGuardError::NoCurrentSession));
}

// F176
//@test C-SES-4
//@test C-STG-3
#[test]
fn packets_that_wait_for_the_handshake_come_out_in_order() {
    let (mut a, mut b) = pair();
    let packets: Vec<_> = (0..5).map(|i| v4(60 + i)).collect();
    let init = a.encapsulate(&packets[0], 0).net();
    assert_eq!(init.len(), 148);
    for p in &packets[1..] {
        assert_eq!(a.encapsulate(p, 10), Out::Done, "a handshake is under way");
    }
    let resp = b.decapsulate(&init, 20).net();
    // Not a keepalive: the first packet confirms as well.
    let mut next = a.decapsulate(&resp, 30);
    for p in &packets {
        assert_eq!(b.decapsulate(&next.net(), 40).tun(), *p);
        next = a.decapsulate(&[], 30);
    }
    assert_eq!(next, Out::Done);
}

//@test C-STG-3
#[test]
fn a_packet_does_not_overtake_those_that_wait() {
    let (mut a, mut b) = pair();
    let init = a.encapsulate(&v4(60), 0).net();
    assert_eq!(a.encapsulate(&v4(61), 0), Out::Done);
    let resp = b.decapsulate(&init, 0).net();
    let first = a.decapsulate(&resp, 0).net();
    // The caller forgets to ask again and sends the third.
    let second = a.encapsulate(&v4(62), 1).net();
    assert_eq!(a.deadline(), Some(1), "there is more");
    let third = a.tick(2).net();
    assert_eq!(a.tick(2), Out::Done);
    for (datagram, len) in [(first, 60), (second, 61), (third, 62)] {
        assert_eq!(b.decapsulate(&datagram, 3).tun(), v4(len));
    }
}

//@test C-SES-2
#[test]
fn the_responder_sends_only_after_the_first_packet_of_the_initiator() {
    let (mut a, mut b) = pair();
    let init = a.initiation(false, 0).net();
    let resp = b.decapsulate(&init, 0).net();
    assert_eq!(b.encapsulate(&v4(60), 1), Out::Done, "it waits, and no initiation crosses the response");
    let confirm = a.decapsulate(&resp, 2).net();
    let waited = b.decapsulate(&confirm, 3).net();
    assert_eq!(a.decapsulate(&waited, 4).tun(), v4(60));
    assert_eq!(b.decapsulate(&[], 5), Out::Done);
}

//@test C-STG-1
#[test]
fn of_too_many_waiting_packets_the_newest_stay() {
    let (mut a, mut b) = pair();
    let init = a.encapsulate(&v4(20), 0).net();
    for len in 21..320 {
        assert_eq!(a.encapsulate(&v4(len), 0), Out::Done);
    }
    let mut next = a.decapsulate(&b.decapsulate(&init, 0).net(), 0);
    for len in 320 - 128..320 {
        assert_eq!(b.decapsulate(&next.net(), 0).tun(), v4(len));
        next = a.decapsulate(&[], 0);
    }
    assert_eq!(next, Out::Done);
}

#[test]
fn a_preshared_key_must_be_the_same_on_both_sides() {
    for (ours, theirs, good) in [
        (Some([1; 32]), Some([1; 32]), true),
        (Some([0; 32]), None, true),
        (Some([1; 32]), None, false),
        (Some([1; 32]), Some([2; 32]), false),
    ] {
        let (mut a, mut b) = pair_with([ours, theirs], None);
        let init = a.initiation(false, 0).net();
        let resp = b.decapsulate(&init, 0).net();
        let answer = a.decapsulate(&resp, 0);
        match good {
            true => assert_eq!(b.decapsulate(&answer.net(), 0), Out::Done),
            false => assert_eq!(answer, Out::Err(WireGuardError::InvalidAeadTag)),
        }
    }
}

// F23
//@test C-TMR-3
#[test]
fn a_thousand_calls_in_five_seconds_make_one_initiation() {
    let (mut a, _) = pair();
    let mut sent = usize::from(a.encapsulate(&v4(60), 0) != Out::Done);
    for i in 0..1000 {
        sent += usize::from(a.tick(i * 5) != Out::Done);
        sent += usize::from(a.encapsulate(&v4(60), i * 5) != Out::Done);
    }
    assert_eq!(sent, 1);
}

// F28
//@test C-TMR-1
#[test]
fn nobody_answers_twenty_tries_then_silence_and_an_error() {
    let (mut a, _) = pair();
    let mut sent = vec![0];
    a.encapsulate(&v4(60), 0).net();
    let mut gave_up = None;
    for t in (0..200_000).step_by(50) {
        match a.tick(t) {
            Out::Done => assert!(gave_up.is_none()),
            Out::Net(init) => {
                assert_eq!((init.len(), gave_up), (148, None));
                sent.push(t);
            }
            Out::Err(WireGuardError::ConnectionExpired) => gave_up = gave_up.or(Some(t)),
            other @ (Out::Err(_) | Out::Tun(..)) => panic!("{other:?}"),
        }
    }
    assert_eq!(sent.len(), 20);
    assert!(sent.windows(2).all(|w| (5_000..5_400).contains(&(w[1] - w[0]))), "{sent:?}");
    assert!((95_000..110_000).contains(&gave_up.unwrap()), "{gave_up:?}");
    assert!(a.0.is_expired());
    // F27: new data begins anew, and what waited before is gone.
    assert_eq!(a.encapsulate(&v4(70), 200_000).net().len(), 148);
    assert!(!a.0.is_expired());
    assert_eq!(a.tick(200_001), Out::Done);
}

// F26, BT-14
//@test C-TMR-6
#[test]
fn a_persistent_keepalive_keeps_trying_and_revives_the_tunnel_after_any_sleep() {
    let (mut a, mut b) = pair_with([None, None], Some(25));
    let mut last = None;
    for t in (0..300_000).step_by(250) {
        if let Out::Net(init) = a.tick(t) {
            assert_eq!(init.len(), 148);
            last = Some(t);
        }
    }
    assert!(last.unwrap() > 290_000, "still trying after 90 s: {last:?}");
    shake(&mut a, &mut b, 300_000);
    pass(&mut a, &mut b, &v4(60), 300_100);
    for jump in [540_000, 600_000] {
        let t = 300_100 + jump;
        let init = (0..4).find_map(|i| match a.tick(t + i) {
            Out::Net(init) => Some(init),
            Out::Done | Out::Err(_) | Out::Tun(..) => None,
        });
        assert_eq!(init.expect("the next tick initiates").len(), 148);
    }
}

// F33
//@test C-TMR-6
#[test]
fn a_persistent_keepalive_of_3_s_is_sent_every_3_s() {
    let (mut a, mut b) = pair_with([None, None], Some(3));
    shake(&mut a, &mut b, 0);
    let mut sent = Vec::new();
    for t in (0..20_000).step_by(100) {
        if let Out::Net(keepalive) = a.tick(t) {
            assert_eq!((keepalive.len(), b.decapsulate(&keepalive, t)), (32, Out::Done));
            sent.push(t);
        }
    }
    assert_eq!(sent, [3000, 6000, 9000, 12_000, 15_000, 18_000]);
}

// F34, F36
//@test C-TMR-5
#[test]
fn one_keepalive_10_s_after_data_and_none_after_a_keepalive() {
    let (mut a, mut b) = shaken();
    pass(&mut a, &mut b, &v4(60), 1000);
    let mut keepalives = Vec::new();
    for t in (1000..60_000).step_by(100) {
        if let Out::Net(k) = b.tick(t) {
            assert_eq!((k.len(), a.decapsulate(&k, t)), (32, Out::Done));
            keepalives.push(t);
        }
        assert_eq!(a.tick(t), Out::Done);
    }
    assert_eq!(keepalives, [11_000]);
}

// F35
//@test C-TMR-4
#[test]
fn silence_after_data_begins_a_handshake_at_15_s_and_a_keepalive_is_no_silence() {
    let (mut a, mut b) = shaken();
    let lost = a.encapsulate(&v4(60), 1000).net();
    assert_eq!(lost.len(), 96);
    let t = (1000..40_000).step_by(50).find(|t| a.tick(*t) != Out::Done).unwrap();
    assert!((16_000..16_400).contains(&t), "{t}");

    let (mut a, mut b2) = shaken();
    pass(&mut a, &mut b2, &v4(60), 1000);
    let keepalive = b2.tick(11_000).net();
    assert_eq!(a.decapsulate(&keepalive, 11_000), Out::Done);
    assert!((11_000..60_000).step_by(50).all(|t| a.tick(t) == Out::Done));
    let _ = &mut b;
}

//@test C-TMR-7
//@test C-TMR-9
#[test]
fn only_the_initiator_renews_the_session_after_120_s() {
    let (mut a, mut b) = shaken();
    pass(&mut a, &mut b, &v4(60), 119_000);
    pass(&mut b, &mut a, &v4(60), 119_000);
    assert_eq!((a.tick(119_500), b.tick(119_500)), (Out::Done, Out::Done));
    pass(&mut b, &mut a, &v4(60), 120_100);
    assert_eq!(b.tick(120_100), Out::Done);
    pass(&mut a, &mut b, &v4(60), 120_200);
    assert_eq!(a.deadline(), Some(120_200));
    let init = a.tick(120_200).net();
    assert_eq!(init.len(), 148);
    // The old session goes on until the new one is confirmed.
    pass(&mut a, &mut b, &v4(61), 120_300);
    let resp = b.decapsulate(&init, 120_300).net();
    let late = b.encapsulate(&v4(62), 120_300).net();
    let confirm = a.decapsulate(&resp, 120_400).net();
    assert_eq!(a.decapsulate(&late, 120_400).tun(), v4(62), "late, on the previous keys");
    assert_eq!(b.decapsulate(&confirm, 120_500), Out::Done);
    pass(&mut b, &mut a, &v4(63), 120_600);
    pass(&mut a, &mut b, &v4(64), 120_600);
    assert_eq!(a.0.time_since_last_handshake_at(at(121_400)), Some(Duration::from_secs(1)));
}

//@test C-TMR-8
#[test]
fn a_received_packet_renews_an_old_session_once() {
    let (mut a, mut b) = shaken();
    pass(&mut b, &mut a, &v4(60), 166_000);
    assert_eq!(a.tick(166_000).net().len(), 148);
    pass(&mut b, &mut a, &v4(60), 166_500);
    assert_eq!(a.tick(166_500), Out::Done);
}

// F24
//@test C-SES-5
#[test]
fn a_packet_after_180_s_waits_for_a_new_session_and_is_delivered_once() {
    let (mut a, mut b) = shaken();
    let init = a.encapsulate(&v4(60), 181_000).net();
    assert_eq!(init.len(), 148);
    let resp = b.decapsulate(&init, 181_000).net();
    let data = a.decapsulate(&resp, 181_000).net();
    assert_eq!(b.decapsulate(&data, 181_000).tun(), v4(60));
    assert_eq!(a.decapsulate(&[], 181_000), Out::Done);
}

//@test C-SES-7
#[test]
fn keys_are_wiped_after_540_s() {
    let (mut a, mut b) = shaken();
    let datagram = b.encapsulate(&v4(60), 0).net();
    assert_eq!(a.tick(539_999), Out::Done);
    assert_eq!(a.tick(540_000), Out::Err(WireGuardError::ConnectionExpired));
    assert!(a.0.is_expired());
    assert_eq!(a.0.time_since_last_handshake_at(at(540_000)), None);
    assert_eq!(a.decapsulate(&datagram, 1), Out::Err(WireGuardError::NoCurrentSession));
    shake(&mut a, &mut b, 541_000);
    assert_eq!(a.tick(541_000), Out::Done);
}

// F16
//@test C-HS-7
#[test]
fn both_sides_may_begin_at_once() {
    let (mut a, mut b) = pair();
    let (ia, ib) = (a.encapsulate(&v4(60), 0).net(), b.encapsulate(&v4(61), 0).net());
    let (ra, rb) = (a.decapsulate(&ib, 10).net(), b.decapsulate(&ia, 10).net());
    let unexpected = Out::Err(WireGuardError::UnexpectedPacket);
    assert_eq!((a.decapsulate(&rb, 20), b.decapsulate(&ra, 20)), (unexpected.clone(), unexpected));
    // The jitter lets one of them retry first.
    let mut t = 20;
    let mut got = Vec::new();
    while got.len() < 2 && t < 12_000 {
        t += 1;
        for (from, to) in [(0, 1), (1, 0)] {
            let ends = [&mut a, &mut b];
            let mut queue: Vec<_> = match ends[from].tick(t) {
                Out::Net(d) => vec![(to, d)],
                Out::Done | Out::Err(_) | Out::Tun(..) => vec![],
            };
            while let Some((to, d)) = queue.pop() {
                match ends[to].decapsulate(&d, t) {
                    Out::Net(d) => {
                        queue.push((1 - to, d));
                        while let Out::Net(d) = ends[to].decapsulate(&[], t) {
                            queue.insert(0, (1 - to, d));
                        }
                    }
                    Out::Tun(p, _) => got.push(p.len()),
                    Out::Done | Out::Err(_) => {}
                }
            }
        }
    }
    got.sort_unstable();
    assert_eq!(got, [60, 61], "at {t} ms");
}

// F25
//@test C-TMR-13
#[test]
fn driven_by_deadlines_alone_the_wire_is_the_same_as_polled_and_every_call_does_something() {
    let (mut polled, _) = pair_with([None, None], Some(30));
    let (mut driven, _) = pair_with([None, None], Some(30));
    let count = |out: Out| usize::from(matches!(out, Out::Net(_)));
    let mut polls = 0;
    for t in (0..400_000).step_by(250) {
        polls += count(polled.tick(t));
    }
    let (mut sent, mut calls, mut t) = (0, 0, 0);
    while let Some(due) = driven.deadline().filter(|due| *due < 400_000) {
        assert!(due >= t, "never earlier than the last call");
        t = due;
        let before = (due, sent);
        sent += count(
            driven
                .0
                .update_timers_at(&mut [0; 2048], driven.0.next_timer_update().map(exactly).unwrap())
                .into(),
        );
        assert!(driven.deadline().is_none_or(|next| (next, sent) != before), "no progress at {t}");
        calls += 1;
    }
    assert!(sent.abs_diff(polls) <= 2, "{sent} and {polls}");
    assert!(calls < 2 * sent + 20, "{calls} calls for {sent} datagrams");
}

fn exactly(mono: Instant) -> Now {
    Now { mono, unix: at(ms(mono)).unix }
}

// F31
#[test]
fn a_clock_that_steps_back_makes_neither_a_panic_nor_a_storm() {
    let (mut a, mut b) = pair_with([None, None], Some(5));
    shake(&mut a, &mut b, 500_000);
    let mut sent = 0;
    for t in [500_000, 499_000, 100, 0, 0, 499_999, 500_001] {
        sent += usize::from(matches!(a.tick(t), Out::Net(_)));
        pass(&mut a, &mut b, &v4(60), t);
        assert!(a.0.stats_at(at(t)).0.unwrap() <= Duration::from_secs(1));
        assert!(a.deadline().unwrap() >= t);
    }
    assert!(sent <= 1);
    let zero = Now::default();
    assert!(matches!(a.0.encapsulate_at(&v4(60), &mut [0; 256], zero), TunnResult::WriteToNetwork(_)));
    assert!(matches!(a.0.update_timers_at(&mut [0; 256], zero), TunnResult::Done));
}

// F163, F10
#[test]
fn handshakes_at_a_normal_rate_never_see_a_cookie_and_slow_answers_are_taken() {
    let (mut a, mut b) = pair();
    for i in 0..500 {
        shake(&mut a, &mut b, i * 500);
    }
    for delay in [100, 300, 1000, 4500] {
        let t = 300_000 + delay * 10;
        let init = a.initiation(true, t).net();
        let resp = b.decapsulate(&init, t + delay).net();
        assert_eq!(a.decapsulate(&resp, t + 2 * delay).net().len(), 32);
        assert_eq!(a.0.stats_at(at(t)).4, Some(2 * delay as u32));
    }
}

/// The exchange of wireguard-rs's `handshake_under_load`, both sides asking for cookies.
//@test C-LOAD-2
//@test C-CK-4
#[test]
fn under_load_a_cookie_is_asked_for_and_then_honoured_within_the_sources_rate() {
    let (a, b) = (secret(), secret());
    let (pa, pb) = (PublicKey::from(&a), PublicKey::from(&b));
    let loaded = |public| Some(Arc::new(RateLimiter::new(public, 0)));
    let mut a = End(Tunn::new_at(a, pb, None, None, 1, loaded(&pa), at(0)));
    let mut b = End(Tunn::new_at(b, pa, None, None, 2, loaded(&pb), at(0)));
    let init = a.initiation(true, 0).net();
    assert_eq!(
        Out::from(b.0.decapsulate_at(None, &init, &mut [0; 256], at(0))),
        Out::Err(WireGuardError::UnderLoad)
    );
    let cookie = b.decapsulate(&init, 0).net();
    assert_eq!((cookie.len(), cookie[0]), (64, 3));
    assert_eq!(a.decapsulate(&cookie, 0), Out::Done);
    assert_eq!(a.decapsulate(&cookie, 0), Out::Err(WireGuardError::InvalidAeadTag), "once");
    let init = a.initiation(true, 100).net();
    assert_ne!(init[132..], [0; 16], "mac2");
    let resp = b.decapsulate(&init, 100).net();
    assert_eq!(resp.len(), 92);
    let cookie = a.decapsulate(&resp, 100).net();
    assert_eq!(cookie.len(), 64);
    assert_eq!(b.decapsulate(&cookie, 100), Out::Done);
    let init = a.initiation(true, 200).net();
    let resp = b.decapsulate(&init, 200).net();
    let confirm = a.decapsulate(&resp, 200).net();
    assert_eq!(b.decapsulate(&confirm, 200), Out::Done);
    pass(&mut b, &mut a, &v4(60), 300);

    let replies: Vec<_> = (0..20).map(|_| b.decapsulate(&init, 400)).collect();
    assert_eq!(replies.iter().filter(|r| **r == Out::Err(WireGuardError::UnderLoad)).count(), 15);
    assert_eq!(replies[0], Out::Err(WireGuardError::WrongTai64nTimestamp), "five in a burst get that far");
}

#[test]
fn a_limiter_can_be_shared_and_counts_anew_each_second() {
    let b = secret();
    let pb = PublicKey::from(&b);
    let limiter = RateLimiter::new(&pb, 3);
    let mut a = End(Tunn::new_at(secret(), pb, None, None, 1, None, at(0)));
    let init = a.initiation(true, 0).net();
    let verify = |t, room| match limiter.verify_packet_at(
        Some([10, 0, 0, 1].into()),
        &init,
        &mut vec![0; room],
        at(t),
    ) {
        Ok(Packet::HandshakeInit(_)) => Out::Done,
        Ok(other) => panic!("{other:?}"),
        Err(result) => result.into(),
    };
    for t in [0, 5000] {
        assert_eq!([verify(t, 64), verify(t, 64), verify(t, 64)], [Out::Done, Out::Done, Out::Done]);
        assert_eq!(verify(t + 999, 64).net().len(), 64);
        assert_eq!(verify(t + 999, 63), Out::Err(WireGuardError::DestinationBufferTooSmall));
    }
}

#[test]
fn a_new_private_key_ends_the_sessions_and_makes_new_ones() {
    let (mut a, mut b) = shaken();
    let key = secret();
    let public = PublicKey::from(&key);
    a.0.set_static_private(key, public, None);
    assert_eq!(a.encapsulate(&v4(60), 1000).net().len(), 148);
    let pa = a.0.local.public.0;
    let key = secret();
    let mut c = End(Tunn::new_at(key.clone(), pa.into(), None, None, 3, None, at(0)));
    assert_eq!(c.decapsulate(&b.initiation(true, 1000).net(), 1000), Out::Err(WireGuardError::InvalidMac));
    b.0 = Tunn::new_at(key, pa.into(), None, None, 3, None, at(0));
    assert_eq!(pa, public.to_bytes());
}

//@test C-PRIM-4
#[test]
fn a_peer_with_a_low_order_key_is_refused_and_nothing_piles_up() {
    let mut a = End(Tunn::new_at(secret(), [0; 32].into(), None, Some(1), 1, None, at(0)));
    for t in 0..10 {
        assert_eq!(a.encapsulate(&v4(60), t * 6000), Out::Err(WireGuardError::WrongKey));
        assert!(!matches!(a.tick(t * 6000 + 1), Out::Net(_)));
        assert!(a.0.peer.staging.is_empty());
    }
}

#[test]
fn statistics_tell_bytes_age_loss_and_round_trip() {
    let (mut a, mut b) = pair();
    assert_eq!(a.0.stats_at(at(0)), (None, 0, 0, 0.0, None));
    shake(&mut a, &mut b, 0);
    for i in 0..20 {
        let datagram = a.encapsulate(&v4(100), 1000).net();
        if i % 2 == 0 {
            b.decapsulate(&datagram, 1000).tun();
        }
    }
    let (age, tx, rx, loss, rtt) = b.0.stats_at(at(2000));
    assert_eq!((age, tx, rx, rtt), (Some(Duration::from_secs(2)), 0, 1000, None));
    assert!((0.35..0.55).contains(&loss), "{loss}");
    assert_eq!(a.0.stats_at(at(0)).1, 2000);
}

#[test]
fn the_methods_that_read_the_clock_do_the_same() {
    let (a, b) = (secret(), secret());
    let (pa, pb) = (PublicKey::from(&a), PublicKey::from(&b));
    let mut a = Tunn::new(a, pb, None, Some(9), 1, None);
    let mut b = Tunn::new(b, pa, None, None, 2, None);
    let (mut x, mut y) = ([0; 2048], [0; 2048]);
    let init = Out::from(a.format_handshake_initiation(&mut x, false)).net();
    assert_eq!(Out::from(a.format_handshake_initiation(&mut x, false)), Out::Done);
    let resp = Out::from(b.decapsulate(None, &init, &mut y)).net();
    let confirm = Out::from(a.decapsulate(None, &resp, &mut x)).net();
    assert_eq!(Out::from(b.decapsulate(None, &confirm, &mut y)), Out::Done);
    let data = Out::from(b.encapsulate(&v4(60), &mut y)).net();
    assert_eq!(Out::from(a.decapsulate(None, &data, &mut x)).tun(), v4(60));
    assert_eq!(Out::from(a.update_timers(&mut x)), Out::Done);
    assert!(a.time_since_last_handshake().unwrap() < Duration::from_secs(5));
    assert!(a.stats().0.is_some());
    assert_eq!((a.persistent_keepalive(), b.persistent_keepalive()), (Some(9), None));
    assert_eq!(Tunn::dst_address(&v4(60)), Some([10, 0, 0, 2].into()));
    assert_eq!(Tunn::dst_address(&[0x45; 19]), None);
    // The secret, the tunnel and the packets print no keys.
    assert!(format!("{a:?} {:?}", Tunn::parse_incoming_packet(&init)).len() < 200);
}

// F04
//@test C-SES-5
//@test C-TMR-7
#[test]
fn counters_are_64_bits_wide_and_end_before_they_repeat() {
    let (mut a, mut b) = shaken();
    let counter = |datagram: &[u8]| u64::from_le_bytes(datagram[8..16].try_into().unwrap());
    a.0.peer.set_sent((1 << 32) - 2);
    for want in (1u64 << 32) - 2..(1 << 32) + 2 {
        let datagram = a.encapsulate(&v4(60), 1).net();
        assert_eq!((counter(&datagram), b.decapsulate(&datagram, 1).tun()), (want, v4(60)));
    }
    // The session is renewed long before its counters end; not while an initiation is younger than 5 s.
    assert_eq!(a.tick(6000), Out::Done);
    a.0.peer.set_sent(1 << 60);
    pass(&mut a, &mut b, &v4(60), 6000);
    assert_eq!(a.tick(6000).net().len(), 148);

    a.0.peer.set_sent(crate::timers::REJECT_AFTER_MESSAGES - 1);
    let last = a.encapsulate(&v4(60), 12_000).net();
    assert_eq!(counter(&last), u64::MAX - (1 << 13) - 1);
    assert_eq!(b.decapsulate(&last, 12_000).tun(), v4(60));
    assert_eq!(a.encapsulate(&v4(60), 12_000).net().len(), 148, "the next one waits for a new session");
    let only = Out::from(a.0.encapsulate_data_at(&v4(60), &mut [0; 2048], at(12_000)));
    assert_eq!(only, Out::Err(WireGuardError::NoCurrentSession));
}

#[test]
fn data_packets_see_a_time_that_never_goes_back_and_is_hardly_old_however_rarely_anything_else_is_called() {
    let mut watch = Watch::default();
    let start = clock::mono();
    let (mut last, mut readings) = (Instant::ZERO, 0);
    while clock::mono().since(start) < Duration::from_millis(300) {
        let before = clock::mono();
        let seen = watch.glance().mono;
        assert!(seen >= last && seen <= clock::mono());
        // One tick, and what a host may hold back the ticks of a virtual machine.
        assert!(before.since(seen) < Duration::from_millis(150), "{:?} old", before.since(seen));
        readings += u32::from(seen != last);
        last = seen;
        if readings % 3 == 0 {
            last = watch.read().mono;
            assert_eq!(watch.sharpen(at(0).into()).mono, at(0).mono, "a time that was told stays");
        }
    }
    assert!(readings > 5, "{readings}");
}
