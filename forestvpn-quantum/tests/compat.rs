//! One embedder's source against boringtun and against us, and the two against each other in one process.

use std::net::IpAddr;
use std::thread::sleep;
use std::time::Duration;

/// What a call asked its caller to do, whichever crate answered.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Done,
    Err(String),
    Net(Vec<u8>),
    Tun(Vec<u8>, IpAddr),
}

/// A tunnel of either crate.
pub(crate) trait Host {
    fn send(&mut self, packet: &[u8]) -> Answer;
    fn receive(&mut self, datagram: &[u8]) -> Answer;
    fn tick(&mut self) -> Answer;
    fn initiate(&mut self, force: bool) -> Answer;
    fn expired(&self) -> bool;
}

pub(crate) struct Identity {
    pub(crate) secret: [u8; 32],
    pub(crate) public: [u8; 32],
}

mod upstream {
    use boringtun as wg;
    include!("compat/embedder.rs");
}

mod ours {
    use forestvpn_quantum as wg;
    include!("compat/embedder.rs");
}

impl Answer {
    fn net(self) -> Vec<u8> {
        let Self::Net(bytes) = self else { panic!("expected a datagram, got {self:?}") };
        bytes
    }

    /// Kind and size class, for comparing traces.
    fn shape(&self) -> String {
        match self {
            Self::Done => "done".into(),
            Self::Err(e) => e.clone(),
            Self::Net(d) => format!("net {} {}", d[0], if d[0] == 4 { 0 } else { d.len() }),
            Self::Tun(p, from) => format!("tun {} {from}", p.len()),
        }
    }
}

fn v4(len: usize) -> Vec<u8> {
    let mut p: Vec<u8> = (0..len).map(|i| i as u8).collect();
    p[0] = 0x45;
    p[2..4].copy_from_slice(&(len as u16).to_be_bytes());
    p[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    p
}

fn v6(len: usize) -> Vec<u8> {
    let mut p = vec![0x60; len];
    p[4..6].copy_from_slice(&((len - 40) as u16).to_be_bytes());
    p
}

/// What it is called, who begins, who answers.
type Pairing = (&'static str, Box<dyn Host>, Box<dyn Host>);

/// The two crates' tunnels in every order of roles.
fn pairings(psk: Option<[u8; 32]>) -> Vec<Pairing> {
    let (a, b) = (upstream::identity(), ours::identity());
    let ours = |me: &Identity, peer: &Identity, index| -> Box<dyn Host> {
        Box::new(ours::Embedder::new(me, peer.public, psk, index))
    };
    let theirs = |me: &Identity, peer: &Identity, index| -> Box<dyn Host> {
        Box::new(upstream::Embedder::new(me, peer.public, psk, index))
    };
    vec![
        ("ours to theirs", ours(&a, &b, 1), theirs(&b, &a, 2)),
        ("theirs to ours", theirs(&a, &b, 1), ours(&b, &a, 2)),
        ("ours to ours", ours(&a, &b, 1), ours(&b, &a, 2)),
    ]
}

/// Moves datagrams to and fro, beginning with one that `from` sent, until nobody has any; gives the packets that
/// came out at either end.
fn settle(from: &mut dyn Host, to: &mut dyn Host, first: Vec<u8>) -> Vec<Vec<u8>> {
    let mut flying = vec![(true, first)];
    let mut packets = Vec::new();
    while !flying.is_empty() {
        let (to_far, datagram) = flying.remove(0);
        let end: &mut dyn Host = if to_far { to } else { from };
        let mut answer = end.receive(&datagram);
        loop {
            match answer {
                Answer::Net(reply) => flying.push((!to_far, reply)),
                Answer::Tun(packet, _) => packets.push(packet),
                Answer::Done => break,
                Answer::Err(e) => panic!("{e}"),
            }
            answer = end.receive(&[]);
        }
        assert!(flying.len() < 100, "a loop");
    }
    packets
}

fn exchange(name: &str, a: &mut dyn Host, b: &mut dyn Host) {
    for len in [20, 21, 36, 100, 1420] {
        for packet in [v4(len), v6(len.max(40))] {
            let there = a.send(&packet).net();
            assert_eq!(settle(a, b, there), std::slice::from_ref(&packet), "{name}");
            let back = b.send(&packet).net();
            assert_eq!(settle(b, a, back), [packet], "{name}");
        }
    }
}

//@test C-FMT-3
#[test]
fn both_crates_shake_hands_and_exchange_data_in_both_roles_with_and_without_psk() {
    for psk in [None, Some([0x55; 32])] {
        for (name, mut a, mut b) in pairings(psk) {
            let packet = v4(60);
            let init = a.send(&packet).net();
            assert_eq!(settle(&mut *a, &mut *b, init), [packet], "{name}");
            exchange(name, &mut *a, &mut *b);
        }
    }
}

//@test C-SES-1
//@test C-SES-2
#[test]
fn data_goes_on_across_new_handshakes_from_either_side() {
    for (name, mut a, mut b) in pairings(None) {
        let init = a.initiate(false).net();
        settle(&mut *a, &mut *b, init);
        for round in 0..3 {
            // Initiations less than 20 ms apart are dropped as a flood.
            sleep(Duration::from_millis(40));
            let (from, to) = if round % 2 == 0 { (&mut b, &mut a) } else { (&mut a, &mut b) };
            let late = from.send(&v4(61)).net();
            let init = from.initiate(true).net();
            let resp = to.receive(&init).net();
            // The old session serves until the new one is confirmed, and its late packets after that.
            let between = to.send(&v4(62)).net();
            let confirm = from.receive(&resp).net();
            assert_eq!(from.receive(&between), Answer::Tun(v4(62), [10, 0, 0, 1].into()), "{name} {round}");
            assert_eq!(settle(&mut **from, &mut **to, confirm), [[0u8; 0]; 0], "{name} {round}");
            assert_eq!(to.receive(&late), Answer::Tun(v4(61), [10, 0, 0, 1].into()), "{name} {round}");
            exchange(name, &mut *a, &mut *b);
        }
    }
}

//@test C-OUT-2
#[test]
fn upstream_takes_our_padding_and_we_take_its_lack_of_it() {
    for (name, mut a, mut b) in pairings(None) {
        let init = a.initiate(false).net();
        settle(&mut *a, &mut *b, init);
        let ours = if name.starts_with("ours") { &mut a } else { &mut b };
        // `send` leaves upstream's minimum of room, which is 148 bytes for a short packet.
        assert_eq!(ours.send(&v4(33)).net().len(), 32 + 48, "{name}");
        assert_eq!(ours.send(&v4(1001)).net().len(), 32 + 1001, "{name}: no room to pad");
    }
}

//@test C-CK-3
//@test C-MAC-2
#[test]
fn each_side_honours_the_others_cookies() {
    for ours_first in [true, false] {
        let (a, b) = (upstream::identity(), ours::identity());
        // A limit of 0: under load from the first message.
        let (mut from, mut to): (Box<dyn Host>, Box<dyn Host>) = match ours_first {
            true => (
                Box::new(ours::Embedder::new(&a, b.public, None, 1)),
                Box::new(upstream::Embedder::with_limiter(
                    &b,
                    a.public,
                    None,
                    2,
                    Some(upstream::limiter(&b, 0)),
                )),
            ),
            false => (
                Box::new(upstream::Embedder::new(&a, b.public, None, 1)),
                Box::new(ours::Embedder::with_limiter(&b, a.public, None, 2, Some(ours::limiter(&b, 0)))),
            ),
        };
        let init = from.initiate(false).net();
        let cookie = to.receive(&init).net();
        assert_eq!((cookie.len(), cookie[0]), (64, 3));
        assert_eq!(from.receive(&cookie), Answer::Done);
        sleep(Duration::from_millis(40));
        let init = from.initiate(true).net();
        assert_ne!(init[132..], [0; 16], "mac2");
        settle(&mut *from, &mut *to, init);
        exchange("cookie", &mut *from, &mut *to);
    }
}

#[test]
fn a_server_finds_the_tunnel_of_each_datagram_with_either_crate() {
    let (a, b) = (upstream::identity(), ours::identity());
    for (name, mut from, mut to) in [
        (
            "ours to theirs",
            Box::new(ours::Embedder::new(&a, b.public, None, 0x1234)) as Box<dyn Host>,
            Box::new(upstream::Embedder::new(&b, a.public, None, 0x77)) as Box<dyn Host>,
        ),
        (
            "theirs to ours",
            Box::new(upstream::Embedder::new(&a, b.public, None, 0x1234)),
            Box::new(ours::Embedder::new(&b, a.public, None, 0x77)),
        ),
    ] {
        let of_b = |datagram: &[u8]| {
            let theirs = upstream::classify(&b, &upstream::limiter(&b, 9), datagram);
            let ours = ours::classify(&b, &ours::limiter(&b, 9), datagram);
            assert_eq!(theirs, ours, "{name}");
            ours
        };
        let init = from.initiate(false).net();
        assert_eq!(of_b(&init), Ok((0x1234, Some(a.public))));
        let resp = to.receive(&init).net();
        assert_eq!(ours::classify(&a, &ours::limiter(&a, 9), &resp), Ok((0x1234, None)));
        assert_eq!(of_b(&resp), Err(Answer::Err("InvalidMac".into())), "it is for the other side");
        let confirm = from.receive(&resp).net();
        assert_eq!(of_b(&confirm), Ok((0x77, None)));
        assert_eq!(of_b(&confirm[..31]), Err(Answer::Err("InvalidPacket".into())));
    }
    for packet in [v4(20), v6(40), v4(20)[..19].to_vec(), vec![]] {
        assert_eq!(ours::destination(&packet), upstream::destination(&packet));
    }
}

/// The same calls on a pair of each crate's tunnels: the same answers in the same order.
fn trace(a: &mut dyn Host, b: &mut dyn Host) -> Vec<String> {
    let mut log = Vec::new();
    let mut note = |answer: Answer| {
        log.push(answer.shape());
        answer
    };
    note(a.tick());
    note(a.receive(&[]));
    note(a.receive(&[0; 7]));
    let init = note(a.send(&v4(60))).net();
    note(a.send(&v4(61)));
    note(a.initiate(false));
    note(a.tick());
    note(b.receive(&init[..147]));
    let mut bad = init.clone();
    bad[20] ^= 1;
    note(b.receive(&bad));
    let resp = note(b.receive(&init)).net();
    note(b.receive(&init));
    note(a.receive(&init));
    let confirm = note(a.receive(&resp)).net();
    note(a.receive(&resp));
    b.receive(&confirm);
    // What waited comes out by asking, however many calls that takes.
    while let Answer::Net(datagram) = a.receive(&[]) {
        b.receive(&datagram);
    }
    let datagram = note(a.send(&v6(80))).net();
    let mut bad = datagram.clone();
    bad[30] ^= 1;
    note(b.receive(&bad));
    note(b.receive(&datagram));
    note(b.receive(&datagram));
    note(b.receive(&[]));
    let keepalive = note(b.send(&[])).net();
    note(a.receive(&keepalive));
    note(a.tick());
    log.push(format!("{} {}", a.expired(), b.expired()));
    log
}

#[test]
fn the_same_calls_get_the_same_answers_from_both_crates() {
    let (a, b) = (upstream::identity(), ours::identity());
    let theirs = trace(
        &mut upstream::Embedder::new(&a, b.public, None, 1),
        &mut upstream::Embedder::new(&b, a.public, None, 2),
    );
    let ours = trace(
        &mut ours::Embedder::new(&a, b.public, None, 1),
        &mut ours::Embedder::new(&b, a.public, None, 2),
    );
    assert_eq!(ours, theirs);
    assert!(ours.len() > 20);
}

#[test]
fn statistics_and_key_changes_work_alike() {
    let (a, b, c) = (upstream::identity(), ours::identity(), ours::identity());
    let mut theirs = upstream::Embedder::new(&a, b.public, None, 1);
    let mut ours = ours::Embedder::new(&b, a.public, None, 2);
    assert_eq!(theirs.statistics(), ours.statistics());
    let init = theirs.initiate(false).net();
    settle(&mut theirs, &mut ours, init);
    let packet = v4(100);
    let there = theirs.send(&packet).net();
    settle(&mut theirs, &mut ours, there);
    let back = ours.send(&packet).net();
    settle(&mut ours, &mut theirs, back);
    assert_eq!(theirs.statistics(), (true, 100, 100, true));
    assert_eq!(ours.statistics(), (true, 100, 100, true));

    theirs.rekey(&c);
    ours.rekey(&c);
    assert!(!theirs.statistics().0 && !ours.statistics().0, "no session is left");
    // Upstream again: its timestamps run 27 s ahead of ours, which `ours` would take for replays by now.
    let mut peer = upstream::Embedder::new(&a, c.public, None, 3);
    sleep(Duration::from_millis(40));
    let init = peer.initiate(false).net();
    settle(&mut peer, &mut ours, init);
    exchange("new key", &mut peer, &mut ours);
}
