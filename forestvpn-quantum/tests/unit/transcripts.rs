//! Whole transcripts against independent implementations: golden ones, the Noise vector, and snow.

use core::net::SocketAddr;

use super::*;
use crate::cookie::{Checker, Signer};
use crate::peer::{Local, Peer};
use crate::session::{self, OpenKey, SealKey};
use crate::time::{Instant, Now};
use crate::wire::Message;

fn unhex(hex: &str) -> Vec<u8> {
    assert!(hex.len().is_multiple_of(2), "{hex}");
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn key(hex: &str) -> PrivateKey {
    PrivateKey::new(unhex(hex).try_into().unwrap())
}

/// Gives out what a test wrote down, in order.
struct Script(Vec<u8>);

impl Entropy for Script {
    fn fill(&mut self, out: &mut [u8]) {
        let rest = self.0.split_off(out.len());
        out.copy_from_slice(&core::mem::replace(&mut self.0, rest));
    }
}

const INITIATOR: &str = "00a799687c01c6388a2c59e4636ba7bc474e4ed83800bf8cf5d4177e8a455459";
const RESPONDER: &str = "7052314d4c81b35422978d78841c0482f6ac11ac7c08a279212e59a2e829956b";

/// One block of transcripts.txt with the inputs it was made from.
struct Golden {
    block: &'static str,
    ephemerals: [&'static str; 2],
    psk: Option<PresharedKey>,
    unix: Duration,
    indices: [u32; 2],
}

impl Golden {
    fn a() -> Self {
        Self {
            block: "A_no_psk",
            ephemerals: [
                "b0b18b2523907f2cfb24d279643cc57f7533d6b92208c3236d67ab35870f1455",
                "402e3f1592a115fd1bfde5c470279c99936de95e8f5e645ae04586d4f2184d4e",
            ],
            psk: None,
            unix: Duration::new(1_700_000_000, 352_321_536),
            indices: [0x0102_0304, 0xa1b2_c3d4],
        }
    }

    fn b() -> Self {
        Self {
            block: "B_psk",
            ephemerals: [
                "882bf65538bf042fead1e814f77d4a5ebad0e134b05da7b3320ae187bb826d7b",
                "f06d4ddcb9c4a980bbf8d5bf6fa9aa71e55420604c0194a6f88a701b55348f4c",
            ],
            psk: Some(PresharedKey::new([0x88; 32])),
            unix: Duration::new(1_700_000_123, 469_762_048),
            indices: [0x0bad_cafe, 0xdead_beef],
        }
    }

    fn get(&self, name: &str) -> Vec<u8> {
        let text = include_str!("transcripts.txt");
        let block = text.split("== ").find(|b| b.starts_with(self.block)).unwrap();
        let line = block.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' ')).unwrap();
        unhex(line.split(' ').next().unwrap())
    }

    fn array<const N: usize>(&self, name: &str) -> [u8; N] {
        self.get(name).try_into().unwrap()
    }

    fn now(&self) -> Now {
        Now { mono: Instant::from_nanos(1_000_000_000), unix: self.unix }
    }

    /// Both ends before the first message.
    fn ends(&self) -> [(Local, Peer); 2] {
        let [i, r] = [INITIATOR, RESPONDER].map(|k| Local::new(key(k), false));
        let mut to_r = Peer::new(r.public, Some(&i), 1);
        let mut to_i = Peer::new(i.public, Some(&r), 2);
        to_r.psk = self.psk.clone();
        to_i.psk = self.psk.clone();
        [(i, to_r), (r, to_i)]
    }

    /// Both ends after the handshake, each step compared.
    fn shaken(&self) -> [(Local, Peer); 2] {
        let [(i, mut to_r), (r, mut to_i)] = self.ends();
        let now = self.now();
        let init = to_r.initiate(&i, self.indices[0], now, &mut Script(unhex(self.ephemerals[0]))).unwrap();
        assert_eq!(init[..], self.get("init"));
        assert!(r.checker.mac1_ok(&init));
        let introduced = introduce(&r.private, &r.public, &init).unwrap();
        assert_eq!(introduced.remote, i.public);
        let (introduced, _) = to_i.accept_initiation(introduced, now.mono).unwrap();
        let entropy = &mut Script(unhex(self.ephemerals[1]));
        let (resp, _) = to_i.respond(introduced, self.indices[1], now.mono, entropy).unwrap();
        assert_eq!(resp[..], self.get("resp"));
        assert!(i.checker.mac1_ok(&resp));
        to_r.accept_response(&i, &resp, now).unwrap();
        [(i, to_r), (r, to_i)]
    }

    fn receive(&self, peer: &mut Peer, datagram: &[u8]) -> Result<(usize, bool, Vec<u8>), Discard> {
        let mut bytes = datagram.to_vec();
        let Some(Message::Data(header)) = wire::parse(datagram) else { panic!("not a data message") };
        let opened = peer.open(header, &mut bytes[16..], None, None, self.now())?;
        Ok((opened.len, opened.confirmed, bytes[16..16 + opened.len].to_vec()))
    }
}

/// What `peer` sends when `packet` is given to it.
fn data(peer: &Peer, packet: &[u8], now: Instant) -> Vec<u8> {
    let mut out = vec![0xaa; session::datagram_len(packet.len(), 1420)];
    session::lay(&mut out, packet.len(), |to| to.copy_from_slice(packet));
    let key = peer.seal_key(now).unwrap();
    key.seal(key.reserve(1, now).unwrap(), &mut out);
    out
}

//@test C-HS-1
//@test C-HS-4
//@test C-MAC-1
//@test C-OUT-2
#[test]
fn handshake_and_data_give_the_golden_bytes_with_and_without_psk() {
    for golden in [Golden::a(), Golden::b()] {
        let [(_, mut to_r), (_, mut to_i)] = golden.shaken();
        let now = golden.now().mono;
        let keepalive = data(&to_r, &[], now);
        assert_eq!(keepalive, golden.get("keepalive_i2r_ctr0"));
        let plain = golden.get("plain");
        let there = data(&to_r, &plain, now);
        assert_eq!(there, golden.get("data_i2r_ctr1"));

        assert!(to_i.seal_key(now).is_none(), "the responder may not send before it is confirmed");
        let (len, confirmed, _) = golden.receive(&mut to_i, &keepalive).unwrap();
        assert_eq!((len, confirmed), (0, true));
        let (_, confirmed, padded) = golden.receive(&mut to_i, &there).unwrap();
        assert_eq!((&padded[..plain.len()], padded.len(), confirmed), (&plain[..], 32, false));

        let back = data(&to_i, &plain, now);
        assert_eq!(back, golden.get("data_r2i_ctr0"));
        assert_eq!(golden.receive(&mut to_r, &back).unwrap().2[..plain.len()], plain);
    }
}

//@test C-PRIM-3
//@test C-HS-4
//@test C-HS-8
#[test]
fn chaining_keys_hashes_and_transport_keys_are_the_golden_ones() {
    assert_eq!(crypto::hash(&[CONSTRUCTION]), CHAIN_0);
    assert_eq!(crypto::hash(&[&CHAIN_0, IDENTIFIER]), HASH_0);
    for golden in [Golden::a(), Golden::b()] {
        let [i, r] = [INITIATOR, RESPONDER].map(key);
        let (i_pub, r_pub) = (i.public_key(), r.public_key());
        let [e_i, e_r] = golden.ephemerals.map(key);
        let start = Symmetric::new(&r_pub);
        assert_eq!(start.parts(), (golden.array("C0"), golden.array("H1_after_Spub_r")));
        assert_eq!(golden.array("H0"), HASH_0);

        let timestamp = TimestampSource::default().next(golden.unix);
        assert_eq!(timestamp, golden.array("timestamp"));
        let ss = crypto::x25519(&i, &r_pub).unwrap();
        let (message, state) = initiate(e_i, &i_pub, &r_pub, &ss, &timestamp, golden.indices[0]).unwrap();
        let after_init = (golden.array("C_after_init"), golden.array("H_after_init"));
        assert_eq!(state.symmetric().parts(), after_init);

        let introduced = introduce(&r, &r_pub, &message).unwrap();
        let (stamp, introduced) = introduced.timestamp(&crypto::x25519(&r, &i_pub).unwrap()).unwrap();
        assert_eq!(stamp, timestamp);
        assert_eq!(introduced.symmetric().parts(), after_init);

        let mut noise = [0; RESPONSE - MACS - 12];
        let end = write_response(introduced, &e_r, golden.psk.as_ref(), &[], &mut noise).unwrap();
        assert_eq!(end.parts(), (golden.array("C_final"), golden.array("H_final")));
        let [send, receive] = end.split();
        assert_eq!(send.bytes()[..], golden.get("initiator_send"));
        assert_eq!(receive.bytes()[..], golden.get("initiator_recv"));

        let derived = complete(&state, &i, golden.psk.as_ref(), &golden.array("resp")).unwrap();
        assert_eq!(derived.send.bytes(), send.bytes());
        assert_eq!(derived.receive.bytes(), receive.bytes());
        assert_eq!([derived.local, derived.remote], golden.indices);
    }
}

//@test C-CK-1
//@test C-CK-2
//@test C-CK-3
//@test C-MAC-2
#[test]
fn cookie_reply_and_mac2_are_the_golden_ones_and_one_reply_is_taken_once() {
    for golden in [Golden::a(), Golden::b()] {
        let [(i, mut to_r), (r, _)] = golden.ends();
        let now = golden.now();
        let ephemeral = || Script(unhex(golden.ephemerals[0]));
        let init = to_r.initiate(&i, golden.indices[0], now, &mut ephemeral()).unwrap();

        let mut checker = Checker::new(&r.public);
        let from: SocketAddr = "192.0.2.16:51820".parse().unwrap();
        let cookie = checker.cookie(from, now.mono, &mut Script((0..32).collect()));
        assert_eq!(cookie[..], golden.get("cookie"));
        assert!(!checker.mac2_ok(&init, &cookie), "no cookie yet: mac2 is zero");
        let reply = checker.reply(&init, &cookie, &mut Script((0..24).collect()));
        assert_eq!(reply[..], golden.get("cookie_reply"));

        let mut forged = reply;
        forged[40] ^= 1;
        assert!(to_r.accept_cookie(&forged, now.mono).is_err());
        to_r.accept_cookie(&reply, now.mono).unwrap();
        assert!(to_r.accept_cookie(&reply, now.mono).is_err(), "the flag is cleared by success");

        // The same message again, which only a test can send: with the golden mac2 this time.
        to_r.timestamps = TimestampSource::default();
        let again = to_r.initiate(&i, golden.indices[0], now, &mut ephemeral()).unwrap();
        assert_eq!(again[INITIATION - MACS..], golden.get("init_with_mac2"));
        assert!(checker.mac2_ok(&again, &cookie));
    }
}

//@test C-CK-1
//@test C-MAC-2
#[test]
fn mac2_is_bound_to_message_address_and_port_and_both_ends_forget_in_time() {
    let r = key(RESPONDER).public_key();
    let (mut checker, mut signer) = (Checker::new(&r), Signer::new(&r));
    let at = |s: u64| Instant::from_nanos(s * 1_000_000_000);
    let from: SocketAddr = "[2001:db8::1]:51820".parse().unwrap();
    let mut secrets = Script([[1; 32], [2; 32]].concat());
    for len in [RESPONSE, INITIATION] {
        let mut message = vec![0x5a; len];
        signer.sign(&mut message, at(100));
        assert!(checker.mac1_ok(&message));
        let cookie = checker.cookie(from, at(100), &mut secrets);
        let reply = checker.reply(&message, &cookie, &mut Script(vec![9; 24]));
        signer.consume(&reply, at(100)).unwrap();
        signer.sign(&mut message, at(101));
        assert!(checker.mac2_ok(&message, &cookie));
        for other in ["[2001:db8::1]:51821", "[2001:db8::2]:51820", "192.0.2.1:51820"] {
            let other = checker.cookie(other.parse().unwrap(), at(101), &mut secrets);
            assert!(!checker.mac2_ok(&message, &other));
        }
        for bit in 0..len * 8 {
            let mut flipped = message.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!checker.mac2_ok(&flipped, &cookie), "bit {bit}");
            assert_eq!(checker.mac1_ok(&flipped), bit >= (len - 16) * 8, "bit {bit}");
        }
    }
    let mut message = [0; INITIATION];
    signer.sign(&mut message, Instant::from_nanos(214_999_999_999));
    assert_ne!(message[INITIATION - 16..], [0; 16], "younger than 115 s");
    let mut message = [0; INITIATION];
    signer.sign(&mut message, at(215));
    assert_eq!(message[INITIATION - 16..], [0; 16], "115 s old");
    let old = checker.cookie(from, Instant::from_nanos(219_999_999_999), &mut secrets);
    assert_eq!(old, checker.cookie(from, at(101), &mut secrets));
    assert_ne!(old, checker.cookie(from, at(220), &mut secrets), "a new secret after 120 s");
    assert!(secrets.0.is_empty());
}

//@test C-HS-2
//@test C-MAC-1
#[test]
fn an_initiation_with_any_bit_flipped_is_refused() {
    let golden = Golden::a();
    let [_, (r, to_i)] = golden.ends();
    let ss = crypto::x25519(&r.private, &to_i.public).unwrap();
    let init: [u8; INITIATION] = golden.array("init");
    // mac2 is not looked at unless we are under load.
    for bit in 0..(INITIATION - 16) * 8 {
        let mut bad = init;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(!r.checker.mac1_ok(&bad), "mac1, bit {bit}");
        match bit / 8 {
            0..4 => assert!(wire::parse(&bad).is_none(), "type, bit {bit}"),
            // Only mac1 protects the sender index, and mac1 itself is no part of the handshake.
            4..8 | 116.. => {}
            // The top bit of a Curve25519 public key is ignored, but it is hashed.
            _ => {
                let refused = introduce(&r.private, &r.public, &bad).and_then(|i| i.timestamp(&ss));
                assert!(refused.is_err(), "handshake, bit {bit}");
            }
        }
    }
}

//@test C-HS-6
//@test C-MAC-1
#[test]
fn a_response_with_any_bit_flipped_is_refused_and_the_true_one_still_works() {
    let golden = Golden::b();
    let [(i, mut to_r), _] = golden.ends();
    let now = golden.now();
    to_r.initiate(&i, golden.indices[0], now, &mut Script(unhex(golden.ephemerals[0]))).unwrap();
    let resp: [u8; RESPONSE] = golden.array("resp");
    for bit in 0..(RESPONSE - 16) * 8 {
        let mut bad = resp;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(!i.checker.mac1_ok(&bad), "mac1, bit {bit}");
        if (12..60).contains(&(bit / 8)) {
            assert_eq!(to_r.accept_response(&i, &bad, now), Err(Discard::BadTag), "handshake, bit {bit}");
        }
    }
    to_r.accept_response(&i, &resp, now).unwrap();
    assert!(to_r.accept_response(&i, &resp, now).is_err(), "a response is taken once");
}

//@test C-HS-8
#[test]
fn a_response_under_another_psk_is_refused() {
    let golden = Golden::a();
    let [(i, mut to_r), _] = golden.ends();
    let now = golden.now();
    to_r.initiate(&i, golden.indices[0], now, &mut Script(unhex(golden.ephemerals[0]))).unwrap();
    to_r.psk = Golden::b().psk;
    assert_eq!(to_r.accept_response(&i, &golden.array("resp"), now), Err(Discard::BadTag));
    // The PSK is read when the response comes: put right, the same response is good.
    to_r.psk = None;
    to_r.accept_response(&i, &golden.array("resp"), now).unwrap();
}

//@test C-HS-3
#[test]
fn a_replayed_or_older_initiation_is_refused() {
    let golden = Golden::a();
    let [_, (r, to_i)] = &mut golden.shaken();
    let later = golden.now().mono.after(Duration::from_secs(60));
    let introduced = introduce(&r.private, &r.public, &golden.array("init")).unwrap();
    assert_eq!(to_i.accept_initiation(introduced, later).err(), Some(Discard::OldTimestamp));
    // Wireshark's first capture has unwhitened timestamps: any newer byte string will do.
    let [(i, _), _] = golden.ends();
    let ss = crypto::x25519(&i.private, &r.public).unwrap();
    let mut stamp: Timestamp = golden.array("timestamp");
    stamp[11] = 1;
    let (newer, _) = initiate(key(golden.ephemerals[0]), &i.public, &r.public, &ss, &stamp, 7).unwrap();
    let introduced = introduce(&r.private, &r.public, &newer).unwrap();
    assert!(to_i.accept_initiation(introduced, later).is_ok());
}

//@test C-RPL-2
#[test]
fn a_data_message_is_delivered_once_and_a_tampered_one_leaves_no_trace() {
    let golden = Golden::b();
    let [_, (_, mut to_i)] = golden.shaken();
    let there = golden.get("data_i2r_ctr1");
    for bit in 0..there.len() * 8 {
        let mut bad = there.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        // Bits of the type make it no data message at all.
        if bit >= 32 {
            assert!(golden.receive(&mut to_i, &bad).is_err(), "bit {bit}");
        }
    }
    assert!(golden.receive(&mut to_i, &there).is_ok());
    assert_eq!(golden.receive(&mut to_i, &there), Err(Discard::Replayed));
    assert!(golden.receive(&mut to_i, &golden.get("keepalive_i2r_ctr0")).is_ok(), "late, but new");
}

//@test C-PRIM-4
#[test]
fn a_peer_with_a_low_order_key_never_gets_a_handshake() {
    let local = Local::new(key(INITIATOR), false);
    let mut one = [0; 32];
    one[0] = 1;
    for public in [PublicKey([0; 32]), PublicKey(one)] {
        let mut peer = Peer::new(public, Some(&local), 1);
        let made = peer.initiate(&local, 1, Golden::a().now(), &mut Script(vec![7; 64]));
        assert!(made.is_none());
    }
    // Nor does a low-order ephemeral get an answer, on either side.
    let golden = Golden::a();
    let [(i, mut to_r), (r, _)] = golden.ends();
    let now = golden.now();
    to_r.initiate(&i, 1, now, &mut Script(unhex(golden.ephemerals[0]))).unwrap();
    let mut init: [u8; INITIATION] = golden.array("init");
    init[8..40].fill(0);
    assert!(introduce(&r.private, &r.public, &init).is_err());
    let mut resp: [u8; RESPONSE] = golden.array("resp");
    resp[12..44].fill(0);
    assert_eq!(to_r.accept_response(&i, &resp, now), Err(Discard::BadTag));
}

/// Whoever sends a low-order ephemeral knows the zero result, so all the rest of the message can be right.
//@test C-PRIM-4
#[test]
fn a_message_that_is_right_but_for_a_low_order_ephemeral_is_refused_by_either_side() {
    let [(i, _), (r, _)] = Golden::a().ends();
    let zero = PublicKey([0; 32]);
    let ss = crypto::x25519(&i.private, &r.public).unwrap();

    let mut init = [0; INITIATION];
    let mut noise = Symmetric::new(&r.public);
    noise.mix_ephemeral(&zero);
    let k = noise.mix_dh_key(&Secret::zero());
    noise.seal(&k, i.public.as_bytes(), &mut init[40..88]);
    let k = noise.mix_dh_key(&ss);
    noise.seal(&k, &[1; 12], &mut init[88..116]);
    assert!(introduce(&r.private, &r.public, &init).is_err());

    let ephemeral = PrivateKey::new([3; 32]);
    let (_, state) = initiate(ephemeral, &i.public, &r.public, &ss, &[1; 12], 1).unwrap();
    let mut noise = Symmetric { chain: state.symmetric.chain.clone(), hash: state.symmetric.hash };
    let mut resp = [0; RESPONSE];
    noise.mix_ephemeral(&zero);
    noise.mix_dh(&Secret::zero());
    noise.mix_dh(&Secret::zero());
    let k = noise.mix_psk(None);
    noise.seal(&k, &[], &mut resp[44..60]);
    assert!(complete(&state, &i.private, None, &resp).is_err());
}

//@test C-HS-4
#[test]
fn timestamps_are_whitened_and_only_grow() {
    let mut source = TimestampSource::default();
    let mut last = [0; 12];
    let second = Duration::from_secs(1);
    let base = Duration::new(1_700_000_000, 999_999_999);
    let steps = [10, 10_000, 1_000_000, 10_000_000, 20_000_000].map(Duration::from_nanos);
    for unix in
        [base, base].into_iter().chain(steps.map(|s| base + s)).chain([base + second, base - 9 * second])
    {
        let stamp = source.next(unix);
        assert!(stamp > last, "{unix:?}");
        let nanos = u32::from_be_bytes(stamp[8..].try_into().unwrap());
        assert!(nanos % (1 << 24) == 0 && nanos < 1_000_000_000, "{nanos}");
        last = stamp;
    }
    assert_eq!(
        last[..8],
        (0x4000_0000_0000_000a_u64 + 1_700_000_002).to_be_bytes(),
        "one step on from the last, not back"
    );
    let stamp = TimestampSource::default().next(Duration::new(1, 16_777_215));
    assert_eq!(stamp[..], unhex("400000000000000b00000000"));
}

/// The one IKpsk2 vector of cacophony's set that has our suite; it has a prologue and payloads of its own.
//@test C-HS-1
#[test]
fn the_public_noise_vector_is_reproduced() {
    let [i, r] = [
        "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
        "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
    ]
    .map(key);
    let [e_i, e_r] = [
        "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
        "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
    ]
    .map(key);
    let psk = PresharedKey::new(*b"This is my Austrian perspective!");
    let (i_pub, r_pub) = (i.public_key(), r.public_key());

    let start = Symmetric::with_hash(crypto::hash(&[&CHAIN_0, b"John Galt"]), &r_pub);
    let ss = crypto::x25519(&i, &r_pub).unwrap();
    let payload = b"Ludwig von Mises";
    let mut first = [0; 32 + 48 + 16 + TAG];
    let middle = write_initiation(start, &e_i, &i_pub, &r_pub, &ss, payload, &mut first).unwrap();
    assert_eq!(
        first[..],
        unhex(concat!(
            "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944001e21de9f98ddd8e2ad57527207",
            "feb56253c9c94a9e496782ecfcb2a75fbcaf1b52948cc48daefe660c62119ab5000980c84831215f2441eba61654",
            "8e832985464cf17e51ee93109008399a21f7e13f"
        ))
    );

    let payload = b"Murray Rothbard";
    let mut second = [0; 32 + 15 + TAG];
    let introduced = Introduced::for_vector(i_pub, e_i.public_key(), middle);
    let end = write_response(introduced, &e_r, Some(&psk), payload, &mut second).unwrap();
    assert_eq!(
        second[..],
        unhex(concat!(
            "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843cb765f2caef0751b8f007572dab0",
            "322217755c0632f365717edbf34d33e87a"
        ))
    );
    assert_eq!(end.parts().1[..], unhex("f5191b875290abcd41347ac3622d9679688a7e980229cb937ef748336cfde0e5"));

    let keys = end.split().map(|k| AeadKey::new(&k));
    for (n, payload, sealed) in [
        (0, &b"F. A. Hayek"[..], "8153ca9833bc3c1b91a7e66e5f4d4f5b59bf9e64c2f20d15f0bba7"),
        (1, b"Carl Menger", "07af0c9c86e1b4e80f36b04ff7688d51141af3debd0332f0a705ef"),
        (2, b"Jean-Baptiste Say", "6ab1467c0448cc78394494abaaf23afce0e234315d6e2624dcbfa8a21c1c4d073d"),
        (
            3,
            b"Eugen B\xf6hm von Bawerk",
            "dfc346c0d2296ae6cf1acf6f12b8456a1dba228cf8d8b774aacf1c47fc53aa80ebc7a4c292",
        ),
    ] {
        let mut buf = [payload, &[0; TAG]].concat();
        keys[n % 2].seal(n as u64 / 2, &[], &mut buf);
        assert_eq!(buf, unhex(sealed), "message {}", n + 2);
    }
}

/// A generic Noise library on the other side: another author's code for everything but the framing.
mod snow_peer {
    use super::*;
    use snow::{Builder, StatelessTransportState};

    fn builder<'b>(local: &'b [u8; 32], psk: &'b [u8; 32]) -> Builder<'b> {
        Builder::new("Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s".parse().unwrap())
            .prologue(IDENTIFIER)
            .unwrap()
            .local_private_key(local)
            .unwrap()
            .psk(2, psk)
            .unwrap()
    }

    struct Random(u8);
    impl Entropy for Random {
        fn fill(&mut self, out: &mut [u8]) {
            self.0 = self.0.wrapping_add(1);
            out.iter_mut().enumerate().for_each(|(n, b)| *b = crypto::hash(&[&[self.0, n as u8]])[0]);
        }
    }

    /// Data both ways, each side opening what the other sealed.
    fn exchange(
        send: &SealKey,
        open: &mut OpenKey,
        snow: &StatelessTransportState,
        snows_index: u32,
        now: Instant,
    ) {
        for (counter, text) in [&b""[..], b"one", &[7; 1420]].into_iter().enumerate() {
            let mut ours = vec![0; session::datagram_len(text.len(), 1420)];
            session::lay(&mut ours, text.len(), |to| to.copy_from_slice(text));
            send.seal(send.reserve(1, now).unwrap(), &mut ours);
            assert_eq!(wire::u32_at(&ours, 4), snows_index);
            let mut plain = vec![0; ours.len()];
            let len = snow.read_message(counter as u64, &ours[16..], &mut plain).unwrap();
            assert_eq!((&plain[..text.len()], len), (text, session::padded(text.len(), 1420)));

            // Unpadded, as boringtun sends it (C-FMT-3).
            let mut theirs = vec![0; 16 + text.len() + 16];
            wire::put(&mut theirs, 0, &4u32.to_le_bytes());
            wire::put(&mut theirs, 4, &open.local().to_le_bytes());
            wire::put(&mut theirs, 8, &(counter as u64).to_le_bytes());
            snow.write_message(counter as u64, text, &mut theirs[16..]).unwrap();
            let Some(Message::Data(header)) = wire::parse(&theirs) else { panic!("no data message") };
            assert_eq!(open.open(header, &mut theirs[16..], None, now), Ok(text.len()));
            assert_eq!(&theirs[16..16 + text.len()], text);
        }
    }

    fn halves(derived: &Derived, now: Instant) -> (SealKey, OpenKey) {
        (
            SealKey::new(&derived.send, derived.remote, true, now),
            OpenKey::new(&derived.receive, derived.local, true, now),
        )
    }

    //@test C-HS-1
    //@test C-FMT-3
    #[test]
    fn snow_answers_our_initiation() {
        for psk in [[0; 32], [0x31; 32]] {
            let (ours, theirs) = (key(INITIATOR), key(RESPONDER));
            let (public, remote) = (ours.public_key(), theirs.public_key());
            let ss = crypto::x25519(&ours, &remote).unwrap();
            let stamp = [0x40; 12];
            let e = ephemeral(&mut Random(psk[0]));
            let (init, state) = initiate(e, &public, &remote, &ss, &stamp, 5).unwrap();

            let mut snow = builder(theirs.as_bytes(), &psk).build_responder().unwrap();
            let mut payload = [0; 12];
            assert_eq!(snow.read_message(&init[8..116], &mut payload).unwrap(), 12);
            assert_eq!((payload, snow.get_remote_static()), (stamp, Some(&public.0[..])));
            let mut resp = [0; RESPONSE];
            wire::put(&mut resp, 0, &2u32.to_le_bytes());
            wire::put(&mut resp, 4, &9u32.to_le_bytes());
            wire::put(&mut resp, 8, &5u32.to_le_bytes());
            assert_eq!(snow.write_message(&[], &mut resp[12..60]).unwrap(), 48);

            // None and all zeros are the same preshared key.
            let own_psk = (psk != [0; 32]).then(|| PresharedKey::new(psk));
            let derived = complete(&state, &ours, own_psk.as_ref(), &resp).unwrap();
            let now = Instant::from_nanos(7);
            let (send, mut open) = halves(&derived, now);
            exchange(&send, &mut open, &snow.into_stateless_transport_mode().unwrap(), 9, now);
        }
    }

    //@test C-HS-1
    #[test]
    fn we_answer_snows_initiation() {
        for psk in [[0; 32], [0x32; 32]] {
            let (theirs, ours) = (key(INITIATOR), key(RESPONDER));
            let (remote, public) = (theirs.public_key(), ours.public_key());
            let mut snow = builder(theirs.as_bytes(), &psk)
                .remote_public_key(&public.0)
                .unwrap()
                .build_initiator()
                .unwrap();
            let stamp = [0x41; 12];
            let mut init = [0; INITIATION];
            wire::put(&mut init, 0, &1u32.to_le_bytes());
            wire::put(&mut init, 4, &9u32.to_le_bytes());
            assert_eq!(snow.write_message(&stamp, &mut init[8..116]).unwrap(), 108);

            let introduced = introduce(&ours, &public, &init).unwrap();
            assert_eq!(introduced.remote, remote);
            let ss = crypto::x25519(&ours, &remote).unwrap();
            let (got, introduced) = introduced.timestamp(&ss).unwrap();
            assert_eq!(got, stamp);
            let own_psk = (psk != [0; 32]).then(|| PresharedKey::new(psk));
            let e = ephemeral(&mut Random(psk[0]));
            let (resp, derived) = respond(introduced, &e, own_psk.as_ref(), 6).unwrap();
            assert_eq!(snow.read_message(&resp[12..60], &mut []).unwrap(), 0);
            let now = Instant::from_nanos(7);
            let (send, mut open) = halves(&derived, now);
            exchange(&send, &mut open, &snow.into_stateless_transport_mode().unwrap(), 9, now);
        }
    }
}

//@test C-SIL-2
#[test]
fn a_recorded_call_tells_who_called_to_whoever_gets_the_responders_key_later() {
    let (caller, called) = (PrivateKey::new([1; 32]), PrivateKey::new([2; 32]));
    let (from, to) = (caller.public_key(), called.public_key());
    let shared = crypto::x25519(&caller, &to).expect("a sound key");
    let own = ephemeral(&mut crate::harness::Seeded(3));
    let (recording, _) = initiate(own, &from, &to, &shared, &[0x40; 12], 7).expect("a sound key");
    let told = introduce(&called, &to, &recording).ok().map(|i| i.remote);
    assert_eq!(told, Some(from));
    let other = PrivateKey::new([3; 32]);
    assert!(introduce(&other, &other.public_key(), &recording).is_err(), "and to nobody else");
}
